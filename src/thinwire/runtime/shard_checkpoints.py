"""Writes a shard's checkpoints, and resumes the shard from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.policies.consistency import consistency
from thinwire.runtime.checkpoint import LOCAL, forget_after, read, steps_in
from thinwire.runtime.checkpointing import CheckpointWriter
from thinwire.runtime.disk import Disk
from thinwire.server.core import ServerCore


class Checkpointer(Mapping[int, dict[str, Any]]):
    """Writes a shard's state every `every` steps, and maps each step to the state in its file.

    The steps are the last two of this run, counting its beginning; files of an earlier run count only if it resumes.

    Args:
        core: the shard.
        path: of the file; the previous file stays as `FILE.previous`.
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
        self._own, self._step, self._has_stale_files = {0}, core.step, True
        self._writer = CheckpointWriter(
            path, self.KIND, every, on_written=self._written, disk=disk, executor=executor, resumes=resumes
        )
        core.checkpoints = self

    def resume(self, step: int | None = None) -> None:
        """Loads the newest checkpoint, or that of a step, before any worker joins.

        Raises:
            ConfigError: there is none, or it is damaged or of another shard.
        """
        self._core.load_state_dict(read(self._writer.path, self.KIND, step, self._writer.disk))
        self._begin_at(self._round)
        own = [0, *steps_in(self._writer.path, self._writer.disk)] if step is None else [step]
        self._own = {*sorted(own)[-2:]}

    def write_if_due(self) -> None:
        """Writes a checkpoint if one is due; called after every event, before its answers are sent."""
        if self._core.failed is not None or self._core.plan is None:
            return
        step, before = self._round, self._step
        if step < before:  # all resumed from an earlier step
            self._writer.wait()
            self._begin_at(step)
            self._own = {step, *(each for each in self._own if each <= step)}
        elif step > before and step % self._writer.every == 0 and self._has_stale_files:
            with suppress(OSError):  # the next write reports the disk's error
                forget_after(self._writer.path, max(self._own), self._writer.disk)
                self._has_stale_files = False
        self._step = step
        self._writer.stepped(step, self._state, lead=consistency(self._core.plan.consistency).lead())

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
        """The shard's step; where every push is an update by itself, the mean number of pushes per worker."""
        plan = self._core.plan
        if plan is None or not consistency(plan.consistency).immediate:
            return self._core.step
        return self._core.step // plan.workers

    def _state(self) -> dict[str, Any] | None:
        """Returns the state; None while some tables are a version ahead of others, because a worker left."""
        return self._core.state_dict() if self._core.is_even else None

    def _begin_at(self, step: int) -> None:
        """Begins at a step. Files of later steps are stale: from before the shard resumed, or of another training."""
        self._step, self._has_stale_files = step, True
        self._writer.begin_at(step)

    def _written(self, step: int) -> None:
        self._own = {*sorted(self._own | {step})[-2:]}
