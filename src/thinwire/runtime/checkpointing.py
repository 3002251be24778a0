"""Writes a process's checkpoints during training.

Training waits while its state is copied; a thread writes the copy. The write completes before the last step before the
next checkpoint. No process is two checkpoints ahead of another, and two files each suffice for a common step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.cautions import notice
from thinwire.errors import ConfigError
from thinwire.runtime.checkpoint import (
    LOCAL,
    UNFINISHED,
    Snapshot,
    files_at,
    remove_unfinished,
)
from thinwire.runtime.disk import Disk


class CheckpointWriter:
    """Writes one process's checkpoints, every `every` steps. A failed write is a warning, and training continues.

    Args:
        path: of the file; the previous file stays as `FILE.previous`.
        kind: the kind of state.
        every: steps between two checkpoints.
        on_written: called with the step of a checkpoint that is on the disk, by the thread that trains.
        disk: the file system.
        executor: runs the writes; by default a thread.
        tried: `try_out` was called for this path before.
        resumes: as for `try_out`.

    Raises:
        ConfigError: `every` is below 1, or no file can be written there.

    Example:
        >>> import tempfile
        >>> writer = CheckpointWriter(Path(tempfile.mkdtemp()) / "file", "example", 10, on_written=print)
        >>> for step in range(1, 20):
        ...     writer.stepped(step, lambda: {"values": [1.0, 2.0]})
        10
        >>> writer.stepped(20, lambda: {"values": [3.0, 4.0]})
        >>> writer.close()
        20
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        every: int,
        *,
        on_written: Callable[[int], None] = lambda step: None,
        disk: Disk = LOCAL,
        executor: Executor | None = None,
        tried: bool = False,
        resumes: bool = False,
    ) -> None:
        if every < 1:
            raise ConfigError(f"a checkpoint every {every} steps; at least 1 is needed")
        self.path, self.kind, self.every, self.disk = path, kind, every, disk
        self._on_written = on_written
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix=f"write {path.name}")
        self._step = 0
        self._pending: tuple[int, Future[None]] | None = None
        self._failing = False
        remove_unfinished(path, disk)
        if not tried:
            try_out(path, disk=disk, resumes=resumes)

    def begin_at(self, step: int) -> None:
        """Sets the step that training begins or resumes at; its state is not written again."""
        self._step = step

    def stepped(self, step: int, state: Callable[[], Mapping[str, Any] | None], *, lead: int = 0) -> None:
        """Writes a checkpoint if one is due; called after every step.

        Args:
            step: that the training has reached.
            state: returns the state; None if it has no state of this exact step.
            lead: the most steps that another process may be ahead of this one.
        """
        if self._pending is None or self._pending[1].done():
            self.wait()
        if step == self._step:
            return
        self._step = step
        if step % self.every == 0:
            self.wait()
            if (taken := state()) is not None:
                snapshot = Snapshot(self.kind, step, taken)
                self._pending = step, self._executor.submit(snapshot.write, self.path, self.disk)
        if step % self.every + 1 + lead >= self.every:
            self.wait()

    def wait(self) -> None:
        """Waits for the write under way, if there is one."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        error = future.exception()
        if error is None:
            self._failing = False
            self._on_written(step)
        elif not isinstance(error, OSError):
            raise error
        elif not self._failing:
            self._failing = True
            notice(
                f"checkpoint {str(self.path)!r} of step {step} cannot be written: {error.strerror or error}. Training "
                f"continues, and the next try is in {self.every} steps; the previous checkpoint is intact"
            )

    def close(self) -> None:
        """Waits for the write under way, and ends the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()


def try_out(path: Path, disk: Disk = LOCAL, *, resumes: bool = False) -> None:
    """Checks, before training begins, that checkpoints can be written.

    If a training resumes, a failure is a warning: a disk that is full now may have space later.

    Args:
        path: of the file.
        disk: the file system.
        resumes: whether a training resumes from the files there.

    Raises:
        ConfigError: no file can be written there.
    """
    trial = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with disk.write(trial, [b"thinwire"]):
            disk.remove(trial)
    except OSError as error:
        with suppress(OSError):
            disk.remove(trial)
        failure = f"checkpoint {str(path)!r} cannot be written: {error.strerror or error}. "
        if not (resumes and files_at(path, disk)):
            raise ConfigError(f"{failure}Choose another place") from error
        notice(f"{failure}Training resumes from the existing checkpoints, and tries again when the next one is due")
