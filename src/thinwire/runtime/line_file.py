"""A file of lines that a training appends to; a failed write does not stop it."""

from __future__ import annotations

from pathlib import Path

from thinwire.cautions import notice
from thinwire.errors import ConfigError


class LineFile:
    """Appends lines, each by one write, so that processes of one machine may share the file.

    A full disk is one warning: training continues, and the file ends there.

    Args:
        path: the file; created if missing, with its folder.
        what: the lines' content, for messages: a plural.

    Raises:
        ConfigError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what, self._ended = path, what, False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)  # open until `close`
        except OSError as error:
            is_file = isinstance(error, FileExistsError)
            why = f"{error.filename} is not a folder" if is_file else error.strerror or error
            raise ConfigError(f"{what} cannot be written to {str(path)!r}: {why}") from error

    def write(self, line: bytes) -> None:
        """Appends a line and its line break."""
        if self._ended:
            return
        try:
            whole = self._file.write(line + b"\n") == len(line) + 1
            why = "no space is left for a whole line"
        except OSError as error:
            whole, why = False, error.strerror or str(error)
        if not whole:
            self._ended = True
            notice(f"{self._what} are no longer written to {str(self._path)!r}: {why}. Training continues without them")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
