"""Text of every machine: the source of Python's standard library as bytes.

The top-level modules in alphabetical order are cut into windows; every tenth module is for testing. The target of each
byte is the next byte. Bytes above 127 become 127. The text depends on the interpreter's version.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads.dataset import Dataset

CONTEXT = 64
VOCABULARY = 128
HOLD_OUT_EVERY = 10
MIN_MODULES = 20


def standard_library() -> Path:
    """Returns the folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(folder: Path) -> list[Path]:
    """Returns the modules in order.

    It leaves out the build's settings (_sysconfigdata…), which differ between machines of one version.
    """
    return sorted(path for path in folder.glob("*.py") if path.is_file() and not path.name.startswith("_sysconfigdata"))


def present(folder: Path) -> bool:
    """Returns whether `folder` holds enough modules to train on."""
    return len(source_files(folder)) >= MIN_MODULES


def python_text(folder: Path | None = None, context: int = CONTEXT) -> Dataset:
    """Returns windows of bytes of Python source; the target of every byte is the next byte."""
    folder = folder or standard_library()
    files = source_files(folder)
    if len(files) < MIN_MODULES:
        raise DataError(
            f"{folder} holds {len(files)} Python modules, expected {MIN_MODULES} or more: this installation has no "
            "standard-library sources; install them (Debian: libpython3-stdlib) or use another data set"
        )
    train_text = _text([path for i, path in enumerate(files) if i % HOLD_OUT_EVERY])
    test_text = _text([path for i, path in enumerate(files) if i % HOLD_OUT_EVERY == 0])
    longest = min(len(train_text), len(test_text)) - 1  # the last byte is a target alone
    if not 1 <= context <= longest:
        raise ConfigError(f"a context of {context:,} bytes; with the sources in {folder} 1 to {longest:,} are possible")
    parts: dict[str, Any] = {}
    for name, text in (("train", train_text), ("test", test_text)):
        windows = _windows(text, context)
        parts |= {f"{name}_x": windows[:, :-1].contiguous(), f"{name}_y": windows[:, 1:].contiguous()}
    parts |= {"mean": torch.zeros(()), "std": torch.ones(())}
    return Dataset(name="python-text", task="bytes", num_classes=VOCABULARY, **parts)


def _text(files: list[Path]) -> bytes:
    try:
        return b"".join(path.read_bytes() for path in files)
    except OSError as error:
        raise DataError(f"a standard-library source cannot be read ({error})") from error


def _windows(text: bytes, context: int) -> torch.Tensor:
    """Returns uint8 (windows, context + 1); a window's last target is the next window's first input."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp_(max=VOCABULARY - 1)
    return data.unfold(0, context + 1, context)
