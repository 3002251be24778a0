"""The file operations that checkpoints need, which tests and simulations replace.

A file is locked while it is written. The system releases the lock when the process ends, so the unfinished file of a
killed process differs from one that a live process is writing. Some file systems have no locks: files are written
there without, and unfinished files stay.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

Bytes = bytes | memoryview


class Disk(Protocol):
    """A file system; its methods raise OSError. Contents last once `write` has entered its context."""

    def write(self, path: Path, parts: Iterable[Bytes]) -> AbstractContextManager[None]:
        """Writes a file and forces its contents to the disk. Locks it, if possible, until the context ends."""

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file; replaces a file that has the new name."""

    def sync(self, folder: Path) -> None:
        """Forces a folder's names to the disk."""

    def remove(self, path: Path) -> None:
        """Removes a file, if it is there."""

    def names(self, folder: Path) -> list[str]:
        """Returns the names in a folder."""

    def abandoned(self, path: Path) -> bool:
        """Returns whether it is certain that no live process is writing a file."""

    def read(self, path: Path, start: int = 0, nbytes: int = -1) -> bytes:
        """Returns some bytes of a file, by default all; fewer where it ends before."""


class LocalDisk:
    """The machine's own file system."""

    @contextmanager
    def write(self, path: Path, parts: Iterable[Bytes]) -> Iterator[None]:
        with path.open("ab", buffering=0) as file:  # does not truncate a file that another process is writing
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(error.errno, "another process is writing it") from error
            except OSError:
                pass  # no locks on this file system, as on some network and user-space ones: see `claim`
            file.truncate(0)
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file)
            yield

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def sync(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def abandoned(self, path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_WRONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a process has the lock, or this file system has no locks
            return False
        finally:
            os.close(descriptor)
        return True

    def read(self, path: Path, start: int = 0, nbytes: int = -1) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(nbytes)
