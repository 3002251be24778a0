"""A lock on a checkpoint path: one process at a time writes there.

A process holds a lock on `FILE.lock` while it writes checkpoints. The system releases the lock when the process ends,
also by `kill -9`; the file that remains blocks no process. On a network file system a machine that has died keeps its
locks for a while: a process that resumes waits for that long.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from thinwire.cautions import notice
from thinwire.errors import ConfigError

LOCK = ".lock"
ENDING_S = 2.0
"""How long a killed process may take to end."""
LEASE_S = 100.0
"""How long a network file system keeps the locks of a machine that has died; NFS by default 90 s."""
_LOOK_S = 0.1


@contextmanager
def claimed(path: Path, *, resumes: bool = False) -> Iterator[None]:
    """Reserves a checkpoint path for this process during the context; without a lock where the system has none.

    Args:
        path: of the file.
        resumes: whether a training resumes from the files there: a machine that has died may still hold the lock.

    Raises:
        ConfigError: another process writes there.
    """
    lock, began, warned = path.with_name(path.name + LOCK), time.monotonic(), False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(_held(lock))
                break
            except BlockingIOError:
                reason, waited = f"another process writes checkpoints to {str(path)!r}", time.monotonic() - began
                if waited >= (LEASE_S if resumes else ENDING_S):
                    raise ConfigError(
                        f"{reason}: wait until that training has ended, or give this one another place"
                    ) from None
                if waited >= ENDING_S and not warned:
                    warned = True
                    notice(f"{reason}, or has died on another machine: this one waits for it, {LEASE_S:.0f} s at most")
                time.sleep(_LOOK_S)
            except OSError:
                break
        yield


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Holds the lock, then removes it. Raises BlockingIOError if another process holds it, OSError without locks."""
    with FileIO(lock, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(file, lock):  # its holder removed it after this process opened it
            raise BlockingIOError
        try:
            yield
        finally:
            with suppress(OSError):
                if _is_at(file, lock):
                    lock.unlink()


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
