"""Files that are written whole: whoever reads one finds the old or the new, and never a part."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes a whole file in place of another, which stays where there is no room for the new one.

    Args:
        path: of the file, in a folder that is there. A link stays, and what it leads to is written.
        content: all of it.

    Raises:
        OSError: it cannot be written.
    """
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
