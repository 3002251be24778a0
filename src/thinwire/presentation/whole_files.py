"""Files that are written whole: a reader finds the old one or the new one, and never a part."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from thinwire.errors import ConfigError


def write_file(path: Path, content: bytes) -> None:
    """Writes a whole file, and makes its folder. An old file stays until the new one is whole, or if there is no room.

    A link stays, and its target is written.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another place") from error


def _replace(path: Path, content: bytes) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):  # of another place, a device or a pipe
        path.write_bytes(content)
        return
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(content)
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
    except OSError:
        if not path.exists() or shutil.disk_usage(path.parent).free < len(content):
            raise
        path.write_bytes(content)  # in a folder in which no other file may be made
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def printable(text: str) -> str:
    r"""Returns text that UTF-8 can hold; of names of files that are not UTF-8, such bytes are spelled out.

    >>> printable("caf\udce9"), printable("café")
    ('caf\\udce9', 'café')
    """
    return text.encode(errors="backslashreplace").decode()
