"""Checks that a command can write its files, before it works for minutes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from thinwire.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg")
"""How the name of a picture's file may end."""

STANDARD_OUTPUT = Path("-")
"""What stands for it in the place of a file's name."""


def writable(path: Path | None) -> Path | None:
    """Returns the path after its folder has been made. No file is changed.

    Raises:
        ConfigError: no file can be written there.
    """
    if path is not None and (path.is_file() or not path.exists()):  # not a device or a pipe
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there, link = path.exists(), path.is_symlink()
            with path.open("ab"):
                pass
            if not there:
                (path.resolve() if link else path).unlink()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file") from error
    return path


def picture(path: Path | None) -> Path | None:
    """As `writable`, of a picture. Raises ConfigError also where its name has no known ending."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise ConfigError(f"{path}: a picture's name ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    return writable(path)


def check_apart(path: Path | None, others: Collection[Path | None], what: str) -> None:
    """Raises ConfigError where a file to be written is one of the files that are read or written besides.

    Args:
        path: of the file; None: of none, as among the others.
        others: the files that it must not be.
        what: says what happens in these files, as in "the picture is drawn".
    """
    if path is not None and any(path.resolve() == each.resolve() for each in others if each is not None):
        raise ConfigError(f"{path} is where {what}; write to another file")
