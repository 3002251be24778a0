"""A state in a file: tensors as safetensors, everything else as JSON in its header, a digest over both. No pickle.

`write` and `read` take any state; a `Checkpointer` writes a shard's, whenever one is due.

A file is written beside its place, forced to the disk and then renamed, so that a reader finds the old one or the new
one and never a part. The one before it stays as `FILE.previous`: processes that write at the same step of a training
do not finish together, and a crash in between must leave a step that all of them have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from thinwire.errors import ConfigError
from thinwire.server.core import ServerCore

FORMAT = 1
"""Raised when an older reader would misread a file."""
PREVIOUS = ".previous"

Tensors = dict[str, torch.Tensor]


def write(path: Path, kind: str, step: int, state: Mapping[str, Any]) -> None:
    """Writes a state; what was at `path` becomes `path` + `.previous`.

    Args:
        path: the file, in a folder that exists.
        kind: what wrote it, which a reader must name.
        step: of the training, which a reader may ask for.
        state: dicts, lists, tuples, numbers, strings, bytes, None, arrays and tensors, nested in any way.

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
    tensors: Tensors = {}
    body = json.dumps({"format": FORMAT, "kind": kind, "step": step, "state": _flat(state, tensors)})
    fresh = path.with_name(path.name + ".new")
    try:
        save_file(tensors, fresh, metadata={"thinwire": body, "xxh3": _digest(body, tensors)})
        _force(fresh)
        if path.exists():
            os.replace(path, _previous(path))
        os.replace(fresh, path)
        _force(path.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"checkpoint {str(path)!r} cannot be written: {error}") from error


def read(path: Path, kind: str, step: int | None = None) -> dict[str, Any]:
    """Returns the state of the newest file, or of the one of a step.

    Raises:
        ConfigError: no such file, another kind, another format, or a file that is damaged.
    """
    there = []
    for file in _candidates(path):
        header = _header(file)
        there.append(header["step"])
        if step in (None, header["step"]):
            return _read(file, header, kind)
    if not there:
        raise ConfigError(f"there is no checkpoint {str(path)!r} to resume from")
    raise ConfigError(f"checkpoint {str(path)!r} is of step {' and '.join(map(str, there))}; step {step} was asked for")


def steps_in(path: Path) -> list[int]:
    """Returns the steps of the files at a path, newest first; none where there is no file.

    Raises:
        ConfigError: a file that is damaged.
    """
    return [_header(file)["step"] for file in _candidates(path)]


class Checkpointer:
    """Writes a shard's state to a file at every so many steps, and reads it back.

    Args:
        core: the shard.
        path: of the file; the one before it stays as `FILE.previous`.
        every: steps (updates of every table) between two checkpoints.

    Raises:
        ConfigError: a number of steps below 1.
    """

    KIND = "server"

    def __init__(self, core: ServerCore, path: Path, every: int) -> None:
        if every < 1:
            raise ConfigError(f"a checkpoint every {every} steps; at least 1 is needed")
        self._core, self._path, self._every = core, path, every
        self._step = core.step

    def resume(self, step: int | None = None) -> None:
        """Loads the newest checkpoint, or that of a step, before anybody joins.

        Raises:
            ConfigError: there is none, or it is damaged or another's.
        """
        self._core.load_state_dict(read(self._path, self.KIND, step))
        self._step = self._core.step

    def write_if_due(self) -> None:
        """Writes a checkpoint where one is due; called after every message, when its answers are on their way.

        Raises:
            ConfigError: the file cannot be written, or the policy of consistency leaves no step to keep.
        """
        step = self._core.step
        if step != self._step:
            self._step = step
            if step % self._every == 0 and self._core.failed is None:
                write(self._path, self.KIND, step, self._core.state_dict())


def _candidates(path: Path) -> list[Path]:
    return [file for file in (path, _previous(path)) if file.exists()]


def _previous(path: Path) -> Path:
    return path.with_name(path.name + PREVIOUS)


def _header(file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            body = (opened.metadata() or {})["thinwire"]
            header: dict[str, Any] = json.loads(body)
            if not {"format", "kind", "step", "state"} <= header.keys():
                raise ValueError(f"it has {sorted(header)}")
    except (OSError, SafetensorError, KeyError, AttributeError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} is no checkpoint, or it is damaged: {error}") from error
    if header["format"] != FORMAT:
        raise ConfigError(f"checkpoint {str(file)!r} has format {header['format']}; this thinwire reads {FORMAT}")
    return header


def _read(file: Path, header: dict[str, Any], kind: str) -> dict[str, Any]:
    if header["kind"] != kind:
        raise ConfigError(f"checkpoint {str(file)!r} is a {header['kind']}'s; a {kind}'s was expected")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a dict
        if _digest(metadata["thinwire"], tensors) != metadata["xxh3"]:
            raise ValueError("its checksum is that of something else")
        state: dict[str, Any] = _deep(header["state"], tensors)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"checkpoint {str(file)!r} is damaged: {error}") from error
    return state


def _flat(value: Any, tensors: Tensors) -> Any:
    """JSON for a value; its tensors and bytes go to `tensors`, and JSON keeps their names."""
    match value:
        case torch.Tensor():
            return {"$tensor": _keep(value, tensors)}
        case np.ndarray():
            return {"$tensor": _keep(torch.from_numpy(value), tensors)}
        case bytes():
            return {"$bytes": _keep(torch.frombuffer(bytearray(value), dtype=torch.uint8), tensors) if value else ""}
        case tuple():
            return {"$tuple": [_flat(each, tensors) for each in value]}
        case list():
            return [_flat(each, tensors) for each in value]
        case dict():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: _flat(each, tensors) for key, each in value.items()}
            return {"$map": [[_flat(key, tensors), _flat(each, tensors)] for key, each in value.items()]}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise ConfigError(f"a {type(value).__name__} cannot be in a checkpoint")


def _keep(tensor: torch.Tensor, tensors: Tensors) -> str:
    name = str(len(tensors))
    tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()  # tensors that share memory are refused
    return name


def _deep(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [_deep(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$bytes": name}:
            return tensors[name].numpy().tobytes() if name else b""
        case {"$tuple": each}:
            return tuple(_deep(each, tensors))
        case {"$map": pairs}:
            return {_deep(key, tensors): _deep(each, tensors) for key, each in pairs}
        case _:
            return {key: _deep(each, tensors) for key, each in value.items()}


def _digest(body: str, tensors: Tensors) -> str:
    digest = xxhash.xxh3_64(body.encode())
    for name in sorted(tensors, key=int):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _force(path: Path) -> None:
    """To the disk: contents of a file, names of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
