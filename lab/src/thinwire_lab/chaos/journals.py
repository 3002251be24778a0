"""Reads a server's journal while the server writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from thinwire.runtime.journal import AnyEntry


class JournalReader:
    """Reads a journal while it is being written.

    Args:
        path: the file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._decoder = msgspec.json.Decoder(AnyEntry)

    def entries(self) -> Iterator[AnyEntry]:
        """Yields the lines that have been completed since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield self._decoder.decode(line)
