"""Checkpoints of a whole run: which files its processes write, and from which step all of them can go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.policies.consistency import consistency
from thinwire.runtime import checkpoint
from thinwire.runtime.checkpoint_folder import CheckpointFolder
from thinwire.runtime.checkpointing import CheckpointWriter
from thinwire.runtime.disk import Disk
from thinwire_lab.jobs.job import Job

KIND = "worker"
FREE = frozenset({"link", "data_root", "eval_every", "eval_steps", "servers_on_workers"})
"""What a resumed run may have otherwise: none of it changes a bit of the weights."""


@dataclass(kw_only=True)
class WorkerCheckpoint:
    """One worker's checkpoints, every so many exchanges.

    Attributes:
        step: where to resume; None takes the newest that all workers and shards have.
        written: the steps of the states that are this worker's own, 0 for the beginning. With `resume` all files are.
    """

    path: Path
    every: int
    resume: bool = False
    step: int | None = None
    written: set[int] = field(default_factory=set)
    disk: Disk = checkpoint.LOCAL

    def writer(self, on_written: Callable[[int], None], executor: Executor | None = None) -> CheckpointWriter:
        """Opens what writes them. Where this worker has begun before, and goes back, its disk is not tried again."""

        def written(step: int) -> None:
            self.written.add(step)
            on_written(step)

        return CheckpointWriter(
            self.path,
            KIND,
            self.every,
            on_written=written,
            disk=self.disk,
            executor=executor,
            tried=bool(self.written),
            resumes=self.resume,
        )

    def steps(self) -> tuple[int, ...]:
        """The steps of the states that this worker can go on from, newest first; none: it begins."""
        return self.own() if self.step is None else (self.step,)

    def began(self, clock: int) -> None:
        """This worker takes part from an exchange on."""
        self.written.update(self.own(), {0} if clock == 0 else ())

    def own(self) -> tuple[int, ...]:
        """The steps of which it has states of its own, the last two, newest first."""
        there = {0, *checkpoint.steps_in(self.path, self.disk)}
        return tuple(sorted(there if self.resume else self.written & there, reverse=True)[:2])

    def forget_after(self, step: int) -> None:
        """Removes its own states of later steps, once all workers go on from this one."""
        if max(self.own(), default=0) > step:
            checkpoint.forget_after(self.path, step, self.disk)
            self.written.difference_update([each for each in self.written if each > step])

    @staticmethod
    def state(job: Job, rank: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what goes into the file: a worker's state, and whose it is."""
        return {"job": asdict(job), "rank": rank, **state}

    def read(self, job: Job, rank: int) -> dict[str, Any] | None:
        """Returns the state to go on from, so far as this worker alone can say."""
        return self.read_step(job, rank, self.step) if self.resume else None

    def read_step(self, job: Job, rank: int, step: int | None) -> dict[str, Any]:
        """Returns the state of a step, or the newest. Errors as for `read`."""
        state = checkpoint.read(self.path, KIND, step)
        ours, theirs = {"rank": rank, **asdict(job)}, {"rank": state["rank"], **state["job"]}
        for key in sorted(ours.keys() - FREE):
            if ours[key] != theirs.get(key):
                raise ConfigError(
                    f"checkpoint {str(self.path)!r} is of a run with {key}={theirs.get(key)!r}; this one has "
                    f"{key}={ours[key]!r}"
                )
        return state


class RunCheckpoints(CheckpointFolder):
    """The checkpoints of all processes of a run: shards and workers, in one folder."""

    def check(self, job: Job) -> None:
        """Makes the folder, and finds out whether all processes can write their files."""
        self.check_files(self._files(job))

    def _files(self, job: Job) -> list[Path]:
        """Every process's file."""
        return [*map(self.server, range(job.shards)), *map(self.worker, range(job.workers))]

    def worker(self, rank: int) -> Path:
        """Where worker `rank` writes."""
        return self.folder / f"worker-{rank}.checkpoint"

    def newest(self, job: Job, min_workers: int | None = None) -> int | None:
        """The newest step of which every process has a checkpoint; None where everybody counts their own."""
        found = {path: checkpoint.steps_in(path) for path in self._files(job)}
        if all(found.values()) and consistency(job.full_design().consistency).immediate:
            return None
        workers = [found[self.worker(rank)] for rank in range(job.workers)]
        common = set.intersection(*(set(found[self.server(index)]) for index in range(job.shards)))
        least = job.workers if min_workers is None else min_workers
        have = {step: sum(step in steps for steps in workers) for step in common}
        common = {step for step in common if have[step] >= least}
        if not common:
            said = ", ".join(f"{path.name}: {' and '.join(map(str, steps)) or 'none'}" for path, steps in found.items())
            raise ConfigError(f"no step in {str(self.folder)!r} can be resumed, for not all processes have it: {said}")
        return max(common, key=lambda step: (have[step], step))

    def forget_lacking(self, job: Job, step: int | None) -> list[int]:
        """Removes the checkpoints of workers that lack the step at which the run goes on; returns their ranks.

        They begin with the shards' parameters.
        """
        if step is None:
            return []
        lacking = [rank for rank in range(job.workers) if step not in checkpoint.steps_in(self.worker(rank))]
        for rank in lacking:
            checkpoint.forget_after(self.worker(rank), -1)
        return lacking
