"""A state in a file: tensors as safetensors, everything else as JSON in its header, a digest over both. No pickle.

A file is written under a temporary name, forced to the disk and then renamed, so a reader finds the old file or the
new one and never a part. The previous file stays as `FILE.previous`: processes that write at the same step do not
finish together, and a crash in between must leave a step that all of them have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load

from thinwire.errors import ConfigError
from thinwire.runtime.disk import Bytes, Disk, LocalDisk
from thinwire.runtime.nested_state import DTYPES, Tensors, put_together, take_apart

FORMAT = 1
"""Raised when an older reader would misread a file."""
PREVIOUS, UNFINISHED = ".previous", ".new"
MAX_HEADER_NBYTES = 100_000_000
"""The limit of safetensors' reader: a longer header is damage."""
LOCAL = LocalDisk()

Header = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of a state, to be written while the state itself changes.

    Args:
        kind: the kind of state, which a reader must name.
        step: of the training, which a reader may ask for.
        state: as for `write`; every tensor in it is copied.

    Raises:
        ConfigError: something in the state cannot be in a checkpoint.
    """

    kind: str
    step: int
    state: Any
    tensors: Tensors = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", take_apart(self.state, self.tensors))

    def parts(self) -> Iterator[Bytes]:
        """Yields the file's contents."""
        body = json.dumps({"format": FORMAT, "kind": self.kind, "step": self.step, "state": self.state})
        header: Header = {"__metadata__": {"thinwire": body, "xxh3": _digest(body, self.tensors)}}
        # Wide values first, so that all are aligned.
        ordered = sorted(self.tensors.items(), key=lambda item: (-item[1].element_size(), int(item[0])))
        offset = 0
        for name, tensor in ordered:
            offsets = [offset, offset := offset + tensor.nbytes]
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for _, tensor in ordered:
            yield _bytes_of(tensor)

    def write(self, path: Path, disk: Disk = LOCAL) -> None:
        """Writes the file; the existing file becomes `path` + `.previous`.

        Args:
            path: of the file.
            disk: the file system.

        Raises:
            OSError: the file cannot be written. The existing files are unchanged, and no temporary file is left.
        """
        fresh = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
        try:
            with disk.write(fresh, self.parts()):
                if path.name in disk.names(path.parent):
                    disk.rename(path, _previous(path))
                disk.rename(fresh, path)
                disk.sync(path.parent)
        except OSError:
            with suppress(OSError):
                disk.remove(fresh)
            raise


def write(path: Path, kind: str, step: int, state: Mapping[str, Any], disk: Disk = LOCAL) -> None:
    """Writes a state; the existing file becomes `path` + `.previous`.

    Args:
        path: the file, in a folder that exists.
        kind: the kind of state, which a reader must name.
        step: of the training, which a reader may ask for.
        state: dicts, lists, tuples, numbers, strings, bytes, None, arrays and tensors, nested in any way.
        disk: the file system.

    Raises:
        ConfigError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "state"
        >>> write(path, "example", 7, {"counts": {1: (2, 3)}, "values": torch.ones(2), "frame": b"abc"})
        >>> read(path, "example")
        {'counts': {1: (2, 3)}, 'values': tensor([1., 1.]), 'frame': b'abc'}
        >>> steps_in(path)
        [7]
    """
    try:
        Snapshot(kind, step, state).write(path, disk)
    except OSError as error:
        raise ConfigError(f"checkpoint {str(path)!r} cannot be written: {error}") from error


def remove_unfinished(path: Path, disk: Disk = LOCAL) -> list[Path]:
    """Removes and returns the unfinished files of killed processes at `path`; never one that a live process writes."""
    with suppress(OSError):  # a folder that cannot be read is reported by the first write
        names = disk.names(path.parent)
        ours = [path.with_name(n) for n in names if n.startswith(f"{path.name}.") and n.endswith(UNFINISHED)]
        removed = [each for each in ours if disk.abandoned(each)]
        for each in removed:
            disk.remove(each)
        return removed
    return []


def read(path: Path, kind: str, step: int | None = None, disk: Disk = LOCAL) -> dict[str, Any]:
    """Returns the state in the newest file, or in the file of `step`.

    Raises:
        ConfigError: no such file, another kind, another format, or a damaged file.
    """
    there = []
    for file in files_at(path, disk):
        header = _header(file, disk)[0]
        there.append(header["step"])
        if step in (None, header["step"]):
            return _read(file, kind, disk)
    if not there:
        raise ConfigError(f"there is no checkpoint {str(path)!r} to resume from")
    raise ConfigError(f"checkpoint {str(path)!r} is of step {' and '.join(map(str, there))}; step {step} was asked for")


def steps_in(path: Path, disk: Disk = LOCAL) -> list[int]:
    """Returns the steps of the files at a path, newest first; an empty list without files.

    Raises:
        ConfigError: a damaged file.
    """
    return [_header(file, disk)[0]["step"] for file in files_at(path, disk)]


def forget_after(path: Path, step: int, disk: Disk = LOCAL) -> None:
    """Removes the files of later steps, and damaged ones, once all processes have resumed from `step`."""
    for file in files_at(path, disk):
        try:
            later = _header(file, disk)[0]["step"] > step
        except ConfigError as error:  # a file that is unreadable now, or of another format, is not damaged
            later = error.__cause__ is not None and not isinstance(error.__cause__, OSError)
        if later:
            disk.remove(file)


def files_at(path: Path, disk: Disk = LOCAL) -> list[Path]:
    """Returns the files at a path, newest first."""
    try:
        names = {*disk.names(path.parent)}
    except OSError:
        return []
    return [file for file in (path, _previous(path)) if file.name in names]


def _previous(path: Path) -> Path:
    return path.with_name(path.name + PREVIOUS)


def _header(file: Path, disk: Disk) -> tuple[Header, dict[str, str]]:
    """Returns a checkpoint's header, and the safetensors metadata that contain it."""
    try:
        nbytes = int.from_bytes(disk.read(file, 0, 8), "little")
        if nbytes > MAX_HEADER_NBYTES:
            raise ValueError(f"a header of {nbytes} bytes")
        metadata = json.loads(disk.read(file, 8, nbytes))["__metadata__"]
        header: Header = json.loads(metadata["thinwire"])
        if not {"format", "kind", "step", "state"} <= header.keys():
            raise ValueError(f"it has {sorted(header)}")
        if type(header["step"]) is not int or header["step"] < 0:
            raise ValueError(f"it is of step {header['step']!r}")
    except (OSError, KeyError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} is no checkpoint, or it is damaged: {error}") from error
    if header["format"] != FORMAT:
        raise ConfigError(f"checkpoint {str(file)!r} has format {header['format']}; this thinwire reads {FORMAT}")
    return header, metadata


def _read(file: Path, kind: str, disk: Disk) -> dict[str, Any]:
    header, metadata = _header(file, disk)
    if header["kind"] != kind:
        raise ConfigError(f"checkpoint {str(file)!r} is a {header['kind']}'s; a {kind}'s was expected")
    try:
        tensors = load(disk.read(file))
        if _digest(metadata["thinwire"], tensors) != metadata["xxh3"]:
            raise ValueError("its checksum does not match")
        state: dict[str, Any] = put_together(header["state"], tensors)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"checkpoint {str(file)!r} is damaged: {error}") from error
    return state


def _digest(body: str, tensors: Tensors) -> str:
    digest = xxhash.xxh3_64(body.encode())
    for name in sorted(tensors, key=int):
        digest.update(_bytes_of(tensors[name]))
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A view of a contiguous tensor's bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
