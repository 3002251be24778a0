"""When a process writes its checkpoints, and where a shard goes on from.

Training waits while its state is copied; a thread writes the copy. The file is on the disk before the last step before
the next checkpoint: no process has one that is two ahead of another's, and two files each hold a step that all have.
Where somebody's disk is full, they would not: older files are kept until everybody is known to have a newer one.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.policies.consistency import consistency
from thinwire.runtime.checkpoint import (
    LOCAL,
    MAX_FILES,
    UNFINISHED,
    Snapshot,
    files_at,
    forget_after,
    needed,
    read,
    remove_needless,
    remove_unfinished,
    steps_in,
)
from thinwire.runtime.disk import Disk
from thinwire.schema import Plan
from thinwire.server.core import ServerCore
from thinwire.server.effects import Effect

FILES = 3
"""At one time, as a rule: the newest, the one before, and the one that is being written."""


class CheckpointWriter:
    """One process's checkpoints, at every so many steps. A write that fails is warned about, and training goes on.

    Args:
        path: of the file; the one before it stays as `FILE.previous`.
        kind: what the states are of.
        every: steps between two checkpoints.
        on_written: called with the step of a checkpoint that is on the disk, by the thread that trains.
        disk: the file system.
        executor: runs the writes; by default a thread.
        tried: whether this training has begun with a writer of this path: a disk that is full now costs a checkpoint.
        resumes: as for `try_out`.

    Raises:
        ConfigError: a number of steps below 1, or no file can be written there.

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
        self._failing = self._many = False
        self._since: int | None = None
        self._needless = False
        remove_unfinished(path, disk)
        if not tried:
            try_out(path, disk=disk, resumes=resumes)

    def begin_at(self, step: int) -> None:
        """The state of this step is not written again."""
        self._step = step

    def stepped(self, step: int, state: Callable[[], Mapping[str, Any]], *, lead: int = 0) -> None:
        """Writes a checkpoint where one is due; called after every step.

        Args:
            step: that the training has reached.
            state: returns it.
            lead: how many steps somebody may be ahead of this one.
        """
        if self._pending is None or self._pending[1].done():
            self.wait()
        if step == self._step:
            return
        self._step = step
        if step % self.every == 0:
            self.wait()
            snapshot = Snapshot(self.kind, step, state())
            self._pending = step, self._executor.submit(snapshot.write, self.path, self.disk, self._since)
        if step % self.every + 1 + lead >= self.every:
            self.wait()

    def keep_since(self, step: int | None, own: Collection[int]) -> list[int]:
        """This step and later ones are still needed by somebody; None: the last two are.

        Args:
            step: which.
            own: the steps whose states are there.

        Returns:
            Those that stay. Others are removed after the next step.
        """
        if step != self._since:
            self._since, self._needless = step, True
        stay = needed(own, step)
        if len(stay) == MAX_FILES and not self._many:
            self._many = self._needless = True
            warnings.warn(
                f"{MAX_FILES} checkpoints {str(self.path)!r} are kept, back to step {stay[-1]}: another process has "
                "none since then, and from now on the oldest is removed. Look for a disk that is full, or for a "
                "worker without checkpoints",
                UserWarning,
                stacklevel=2,
            )
        self._many = len(stay) == MAX_FILES
        self._needless = self._needless or len(stay) < len(own)
        return stay

    def wait(self) -> None:
        """Waits for the write under way, if there is one, and removes what is needed no longer."""
        if self._pending is not None:
            self._take_result()
        if self._needless:
            self._needless = False
            with suppress(OSError):  # the next time is as good
                remove_needless(self.path, self._since, self.disk)

    def _take_result(self) -> None:
        assert self._pending is not None
        (step, future), self._pending = self._pending, None
        error = future.exception()
        if error is None:
            self._failing = False
            self._on_written(step)
        elif not isinstance(error, OSError):
            raise error
        elif not self._failing:
            self._failing = True
            warnings.warn(
                f"checkpoint {str(self.path)!r} of step {step} cannot be written: {error.strerror or error}. Training "
                f"goes on, and the next try is in {self.every} steps; the checkpoint before is still whole",
                UserWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Waits for the write under way, and ends the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()


class Checkpointer(Mapping[int, dict[str, Any]]):
    """Writes a shard's state at every so many steps, and reads it back: the states are its values, by step.

    Those are its own: what was in the files before it began counts only where it resumes. The beginning, step 0, counts
    as well while it is one of the last two, or needed by others.

    Args:
        core: the shard.
        path: of the file; the one before it stays as `FILE.previous`.
        every: steps (updates of every table) between two checkpoints.
        disk, executor, resumes: as for `CheckpointWriter`.

    Raises:
        ConfigError: as for `CheckpointWriter`.
    """

    KIND = "server"

    def __init__(
        self,
        core: ServerCore,
        path: Path,
        every: int,
        disk: Disk = LOCAL,
        executor: Executor | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        self._core = core
        self._own, self._step, self._others_there = {0}, core.step, True
        self._resumed: int | None = None
        self._writer = CheckpointWriter(
            path, self.KIND, every, on_written=self._written, disk=disk, executor=executor, resumes=resumes
        )
        core.checkpoints = self

    def resume(self, step: int | None = None) -> None:
        """Loads the newest checkpoint, or that of a step, before anybody joins.

        Raises:
            ConfigError: there is none, or it is damaged or another's.
        """
        self._core.load_state_dict(read(self._writer.path, self.KIND, step, self._writer.disk))
        self._begin_at(self._round)
        self._own = {0, *steps_in(self._writer.path, self._writer.disk)} if step is None else {step}
        self._resumed = self._step

    def check_space(self, plan: Plan) -> None:
        """Raises ConfigError where a shard with this plan, which nobody has begun yet, has no room for its files."""
        if self._core.plan is None:
            values = sum(math.prod(spec.shape) for spec in plan.tables)
            try_out(self._writer.path, shard_nbytes(4 * values), self._writer.disk)

    def write_if_due(self) -> list[Effect]:
        """Writes a checkpoint where one is due; called after every event, when its answers are on their way.

        Returns:
            What the workers are to hear of it.

        Raises:
            ConfigError: the tables are at different steps.
        """
        if self._core.failed is not None or self._core.plan is None:
            return []
        step, before = self._round, self._step
        if step < before:  # all went back
            self._writer.wait()
            self._begin_at(step)
            self._own = {step, *(each for each in self._own if each <= step)}
        elif step > before and step % self._writer.every == 0 and self._others_there:
            forget_after(self._writer.path, max(self._own), self._writer.disk)
            self._others_there = False
        self._step = step
        self._writer.stepped(step, self._core.state_dict, lead=consistency(self._core.plan.consistency).lead())
        self._own = {*self._writer.keep_since(self._since, self._own)}
        return self._core.saved(self._own)

    def close(self) -> None:
        """Waits for the write under way."""
        self._writer.close()

    def __getitem__(self, step: int) -> dict[str, Any]:
        return read(self._writer.path, self.KIND, step, self._writer.disk)

    def __iter__(self) -> Iterator[int]:
        self._writer.wait()
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    @property
    def _round(self) -> int:
        """The shard's step; where every push is an update by itself, how many of them a worker has made on average."""
        plan = self._core.plan
        if plan is None or not consistency(plan.consistency).immediate:
            return self._core.step
        return self._core.step // plan.workers

    @property
    def _since(self) -> int | None:
        """From which step on somebody may need the files; a shard that resumed waits for its workers to say so."""
        safe = self._core.safe_step
        if safe is None and self._resumed is not None and sum(each > self._resumed for each in self._own) < 2:
            return min(self._own)
        return safe

    def _begin_at(self, step: int) -> None:
        """Files of later steps are of before the shard went back to this one, or of another training."""
        self._step, self._others_there = step, True
        self._writer.begin_at(step)

    def _written(self, step: int) -> None:
        self._own.add(step)


def shard_nbytes(model_nbytes: int) -> int:
    """Returns about how many bytes a shard's file takes: values, the workers' copy, one state of the optimizer."""
    return 3 * model_nbytes


def try_out(path: Path, nbytes: int = 0, disk: Disk = LOCAL, *, resumes: bool = False) -> None:
    """Finds out, before there is anything to lose, whether checkpoints can be written.

    Where there is something to lose, as somebody resumes, it warns: a disk that is full now may not stay so.

    Args:
        path: of the file.
        nbytes: about how many a file takes.
        disk: the file system.
        resumes: whether a training goes on from what is there.

    Raises:
        ConfigError: no file can be written there, or there is no room for three.
    """
    try:
        _try_out(path, nbytes, disk)
    except ConfigError as error:
        if not (resumes and files_at(path, disk)):
            raise
        warnings.warn(
            f"{error}. Training goes on from the checkpoints that are there, and new ones are tried when they are due",
            UserWarning,
            stacklevel=3,
        )


def _try_out(path: Path, nbytes: int, disk: Disk) -> None:
    trial = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with disk.write(trial, [b"thinwire"]):
            disk.remove(trial)
        free = disk.free(path.parent)
    except OSError as error:
        raise ConfigError(
            f"checkpoint {str(path)!r} cannot be written: {error.strerror or error}. Choose another place"
        ) from error
    check_space(path.parent, free, nbytes * (FILES - len(files_at(path, disk))))


def check_space(folder: Path, free: int, needed: int) -> None:
    """Raises ConfigError where fewer bytes are free in a folder than checkpoints need."""
    if needed > free:
        raise ConfigError(
            f"checkpoints in {str(folder)!r} need about {needed / 1e6:,.0f} MB more, and {free / 1e6:,.0f} MB are "
            "free: free some space, or choose another place"
        )
