"""The file system as checkpoints see it: a handful of operations, which tests and simulations replace.

A file that is being written is locked. The system drops the lock with the process, so a file that was left behind by a
killed process is known from one that a live process is writing. Some file systems have no locks: there files are
written without, and what is left behind stays.
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
        """Writes a file and forces its contents to the disk. It is locked until the context ends, where it can be."""

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file over whatever has the new name."""

    def sync(self, folder: Path) -> None:
        """Forces a folder's names to the disk."""

    def remove(self, path: Path) -> None:
        """Removes a file, if it is there."""

    def names(self, folder: Path) -> list[str]:
        """Returns the names in a folder."""

    def abandoned(self, path: Path) -> bool:
        """Whether it is known that no live process is writing a file."""

    def read(self, path: Path, start: int = 0, nbytes: int = -1) -> bytes:
        """Returns some bytes of a file, by default all; fewer where it ends before."""


class LocalDisk:
    """The machine's own file system."""

    @contextmanager
    def write(self, path: Path, parts: Iterable[Bytes]) -> Iterator[None]:
        with path.open("ab", buffering=0) as file:  # what another process is writing is not truncated
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
        except OSError:  # a process has the lock, or there are no locks here, and nobody can say
            return False
        finally:
            os.close(descriptor)
        return True

    def read(self, path: Path, start: int = 0, nbytes: int = -1) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(nbytes)
