"""Whether a command can write into a folder: checked before it works for minutes."""

from __future__ import annotations

from pathlib import Path

from thinwire.cli.outputs import writable
from thinwire.errors import ConfigError


def writable_folder(folder: Path) -> None:
    """Raises ConfigError where no folder, or no file in it, can be made. Nothing is changed."""
    there = folder.exists()
    try:
        writable(folder / ".thinwire")
        if not there:
            folder.rmdir()
    except (ConfigError, OSError) as error:
        raise ConfigError(f"nothing can be written in the folder {folder}: {error.__cause__ or error}") from error
