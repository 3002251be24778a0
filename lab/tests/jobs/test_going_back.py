"""One of several shards is lost and started again: everybody goes back by itself, and ends with the same bits."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from thinwire.engines.events import Event
from thinwire.errors import SessionLostError, StepMismatchError
from thinwire.runtime import checkpoint
from thinwire.runtime.connection import ReconnectingConnection
from thinwire.runtime.serving import serving
from thinwire.runtime.shard_checkpoints import Checkpointer
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection
from thinwire.transports.memory import MemoryServer
from thinwire_lab.cli.worker import rejoining
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.checkpoints import KIND, RunCheckpoints, WorkerCheckpoint
from thinwire_lab.jobs.events import Checkpointed
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome
from thinwire_lab.jobs.training import run_worker


class Run:
    """Two workers as threads and two shards in memory, one of which dies after a worker's checkpoint of some step."""

    def __init__(self, job: Job, folder: Path, *, every: int, dies_after: int) -> None:
        self.job, self.dies_after = job, dies_after
        self.checkpoints = RunCheckpoints(folder=folder, every=every)
        self.checkpoints.check(job)
        self._checkpointers: dict[int, Checkpointer] = {}
        self.servers = [self.serve(shard) for shard in range(job.servers)]
        self.said: list[str] = []
        self._dying = threading.Lock()
        self._built = threading.Event()  # torch has one random generator in a process: worker 0 builds its model first

    def serve(self, shard: int, *, resume: bool = False) -> MemoryServer:
        if shard in self._checkpointers:  # a process's lock on what it writes would have ended with it
            self._checkpointers[shard].close()
        core = ServerCore()
        checkpointer = self._checkpointers[shard] = Checkpointer(
            core, self.checkpoints.server(shard), self.checkpoints.every
        )
        if resume:
            checkpointer.resume()
        return MemoryServer(serving(core, checkpointer=checkpointer, grace_s=60))

    def report(self, event: Event) -> None:
        with self._dying:
            if isinstance(event, Checkpointed) and event.step == self.dies_after:
                self.dies_after = -1
                self.servers[1].stop(grace_s=0)
                self.servers[1] = self.serve(1, resume=event.step >= self.checkpoints.every)

    def connections(self) -> list[str | Connection]:
        self._built.set()

        def dial(shard: int, _timeout_s: float) -> Connection:
            return self.servers[shard].connect()

        return [
            ReconnectingConnection(partial(dial, shard), connect_timeout_s=1, reconnect_s=60)
            for shard in range(self.job.servers)
        ]

    def train(self) -> list[WorkerOutcome | BaseException]:
        results: list[Any] = [None] * self.job.workers

        def work(rank: int) -> None:
            if rank:
                self._built.wait(60)
            mine = WorkerCheckpoint(path=self.checkpoints.worker(rank), every=self.checkpoints.every)
            try:
                results[rank] = rejoining(
                    lambda kept, returning: run_worker(
                        self.job,
                        rank=rank,
                        servers=self.connections,
                        report=self.report,
                        checkpoint=kept,
                        returning=returning,
                    ),
                    mine,
                )
            except BaseException as error:
                results[rank] = error

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.job.workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "it hangs"
        self.said = [str(each.message) for each in said]
        for server in self.servers:
            server.stop()
        return results


def test_one_of_two_shards_is_lost(tmp_path: Path) -> None:
    cases: list[tuple[str, int]] = [("3lc[s=1.0]", 4), ("doublesqueeze-topk", 6)]
    for design, dies_after in cases:
        job = Job(design=design, workers=2, servers=2, steps=11, batch=16)
        expected = in_process.run(job).weights
        run = Run(job, tmp_path / design, every=2, dies_after=dies_after)
        for outcome in run.train():
            assert isinstance(outcome, WorkerOutcome), outcome
            assert (outcome.weights, outcome.steps) == (expected, job.steps)
        assert sum("This worker joins again" in each for each in run.said) >= 2, run.said


@pytest.mark.parametrize("wrote", [False, True])
def test_residuals_of_another_run_that_wrote_to_the_same_file_are_nobodys(wrote: bool, tmp_path: Path) -> None:
    job, path = Job(design="3lc", workers=2, steps=50), tmp_path / "worker.checkpoint"
    for step in (30, 40):
        checkpoint.write(path, KIND, step, WorkerCheckpoint.state(job, 0, {"whose": "another run's"}))
    errors = [SessionLostError("frozen"), StepMismatchError("the others go on at 19", 19)]
    found: list[Any] = []

    def train(kept: WorkerCheckpoint | None, returning: bool) -> Any:
        assert kept is not None
        if len(errors) == 2:  # this run begins anew
            kept.began(0, late=False)
            if wrote:
                checkpoint.write(path, KIND, 10, WorkerCheckpoint.state(job, 0, {"whose": "this run's"}))
                kept.written.add(10)
        found[:] = [kept.residuals, kept.own(), kept.read(job, 0)]
        if errors:
            raise errors.pop(0)
        return "done"

    with pytest.warns(UserWarning, match="This worker") as said:
        rejoining(train, WorkerCheckpoint(path=path, every=10))
    whose = "with the residuals of its newest checkpoint" if wrote else "with empty residuals"
    assert whose in str(said[-1].message)
    residuals, own, state = found
    assert (residuals, own) == ((True, (10, 0)) if wrote else (False, (0,)))
    assert state["whose"] == "this run's" if wrote else state is None
