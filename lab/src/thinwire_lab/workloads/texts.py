"""Texts as bytes: the source of Python's standard library, and the English quotations of Debian's package fortunes.

The files in alphabetical order are cut into windows; every tenth file is for testing. The target of each byte is the
next byte. Bytes above 127 become 127. The first text depends on the interpreter's version.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads.dataset import Dataset

CONTEXT = 64
VOCABULARY = 128
HOLD_OUT_EVERY = 10
MIN_FILES = 20


@dataclass(frozen=True)
class Text:
    """A text in the files of a folder.

    Attributes:
        name: the data set's name.
        home: returns the folder.
        is_part: whether a file of the folder is a part of the text.
        files: what the files are, in the plural.
        how: where to get them.
    """

    name: str
    home: Callable[[], Path]
    is_part: Callable[[Path], bool]
    files: str
    how: str

    def paths(self, folder: Path) -> list[Path]:
        """Returns the text's files in order."""
        return sorted(path for path in folder.glob("*") if path.is_file() and self.is_part(path))

    def present(self, folder: Path) -> bool:
        """Returns whether `folder` holds enough files to train on."""
        return len(self.paths(folder)) >= MIN_FILES

    def load(self, folder: Path | None = None, context: int = CONTEXT) -> Dataset:
        """Returns windows of bytes; the target of every byte is the next byte."""
        folder = folder or self.home()
        files = self.paths(folder)
        if len(files) < MIN_FILES:
            raise DataError(
                f"{folder} holds {len(files)} {self.files}, expected {MIN_FILES} or more: install {self.how}, or use "
                "another data set"
            )
        train_text = self._read([path for i, path in enumerate(files) if i % HOLD_OUT_EVERY])
        test_text = self._read([path for i, path in enumerate(files) if i % HOLD_OUT_EVERY == 0])
        longest = min(len(train_text), len(test_text)) - 1  # the last byte is a target alone
        if not 1 <= context <= longest:
            raise ConfigError(
                f"a context of {context:,} bytes; with the {self.files} in {folder} 1 to {longest:,} are possible"
            )
        parts: dict[str, Any] = {}
        for part, text in (("train", train_text), ("test", test_text)):
            windows = _windows(text, context)
            parts |= {f"{part}_x": windows[:, :-1].contiguous(), f"{part}_y": windows[:, 1:].contiguous()}
        parts |= {"mean": torch.zeros(()), "std": torch.ones(())}
        return Dataset(name=self.name, task="bytes", num_classes=VOCABULARY, **parts)

    def _read(self, files: list[Path]) -> bytes:
        try:
            return b"".join(path.read_bytes() for path in files)
        except OSError as error:
            raise DataError(f"a file of {self.name} cannot be read ({error})") from error


PYTHON = Text(
    "python-text",
    lambda: Path(sysconfig.get_path("stdlib")),
    # The build's settings differ between machines of one version.
    lambda path: path.suffix == ".py" and not path.name.startswith("_sysconfigdata"),
    "Python modules",
    "the standard library's sources (Debian: libpython3-stdlib)",
)
QUOTATIONS = Text(
    "quotations",
    lambda: Path("/usr/share/games/fortunes"),
    # Beside each text stand its index (.dat) and a link to it (.u8).
    lambda path: not path.suffix,
    "files of quotations",
    "Debian's package fortunes",
)


def _windows(text: bytes, context: int) -> torch.Tensor:
    """Returns uint8 (windows, context + 1); a window's last target is the next window's first input."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp_(max=VOCABULARY - 1)
    return data.unfold(0, context + 1, context)
