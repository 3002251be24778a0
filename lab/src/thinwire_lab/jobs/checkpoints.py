"""Checkpoints of a whole run: the files of its processes, and the newest step from which all can continue."""

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
"""Options that a resumed run may change, because they leave the weights as they are."""


@dataclass(kw_only=True)
class WorkerCheckpoint:
    """One worker's checkpoints, one every `every` exchanges.

    Attributes:
        step: where to resume; None takes the newest that all workers and shards have.
        written: the steps of this worker's states, 0 for the beginning. With `resume` all files are this worker's.
    """

    path: Path
    every: int
    resume: bool = False
    step: int | None = None
    written: set[int] = field(default_factory=set)
    disk: Disk = checkpoint.LOCAL

    def writer(self, on_written: Callable[[int], None], executor: Executor | None = None) -> CheckpointWriter:
        """Returns the writer. It tests the disk unless this worker has written before."""

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
        """Returns the steps from which this worker can continue, newest first; empty where it begins."""
        return self.own() if self.step is None else (self.step,)

    def began(self, clock: int) -> None:
        """Notes that this worker trains from an exchange on."""
        self.written.update(self.own(), {0} if clock == 0 else ())

    def own(self) -> tuple[int, ...]:
        """Returns the steps of this worker's last two states, newest first."""
        there = {0, *checkpoint.steps_in(self.path, self.disk)}
        return tuple(sorted(there if self.resume else self.written & there, reverse=True)[:2])

    def forget_after(self, step: int) -> None:
        """Removes this worker's states of later steps, once all workers continue from this one."""
        if max(self.own(), default=0) > step:
            checkpoint.forget_after(self.path, step, self.disk)
            self.written.difference_update([each for each in self.written if each > step])

    @staticmethod
    def state(job: Job, rank: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the file's content: a worker's state with its job and rank."""
        return {"job": asdict(job), "rank": rank, **state}

    def read(self, job: Job, rank: int) -> dict[str, Any] | None:
        """Returns the state at `step`, or this worker's newest; None without `resume`."""
        return self.read_step(job, rank, self.step) if self.resume else None

    def read_step(self, job: Job, rank: int, step: int | None) -> dict[str, Any]:
        """Returns the state of a step, or the newest."""
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
        """Makes the folder, and checks that all processes can write their files."""
        self.check_files(self._files(job))

    def _files(self, job: Job) -> list[Path]:
        return [*map(self.server, range(job.shards)), *map(self.worker, range(job.workers))]

    def worker(self, rank: int) -> Path:
        """Returns the file of a worker."""
        return self.folder / f"worker-{rank}.checkpoint"

    def newest(self, job: Job, min_workers: int | None = None) -> int | None:
        """Returns the newest step in every process's checkpoints; None if each worker counts its own steps."""
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
            raise ConfigError(f"no step in {str(self.folder)!r} is in the checkpoints of all processes: {said}")
        return max(common, key=lambda step: (have[step], step))

    def forget_lacking(self, job: Job, step: int | None) -> list[int]:
        """Removes the checkpoints of workers that lack the step from which the run continues; returns their ranks.

        These workers begin with the shards' parameters.
        """
        if step is None:
            return []
        lacking = [rank for rank in range(job.workers) if step not in checkpoint.steps_in(self.worker(rank))]
        for rank in lacking:
            checkpoint.forget_after(self.worker(rank), -1)
        return lacking
