"""A resumed run ends with the bits of an undisturbed one; wrong files raise ConfigError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.tests.jobs.workers import run_workers
from thinwire.engines.events import Event
from thinwire.errors import ConfigError, SessionLostError
from thinwire.runtime import checkpoint
from thinwire.runtime.serving import serving
from thinwire.runtime.shard_checkpoints import Checkpointer
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer
from thinwire_lab.cli.worker import rejoining
from thinwire_lab.jobs.checkpoints import KIND, RunCheckpoints, WorkerCheckpoint
from thinwire_lab.jobs.events import Checkpointed
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome

STEPS, EVERY, STOP = 9, 2, 4


class Stopped(Exception):
    pass


def run(job: Job, checkpoints: RunCheckpoints, *, stop: int | None = None) -> list[WorkerOutcome | BaseException]:
    """Trains in threads, with files; with `stop`, every worker dies after its checkpoint of that step."""
    checkpoints.check(job)
    step = checkpoints.newest(job) if checkpoints.resume else None
    servers, checkpointers = [], []
    for index in range(job.servers):
        core = ServerCore()
        checkpointer = Checkpointer(core, checkpoints.server(index), checkpoints.every)
        if step is not None:
            checkpointer.resume(step)
        checkpointers.append(checkpointer)
        servers.append(MemoryServer(serving(core, checkpointer=checkpointer)))

    def report(event: Event) -> None:
        if isinstance(event, Checkpointed) and event.step == stop:
            raise Stopped

    def own(rank: int) -> dict[str, Any]:
        path, every, resume = checkpoints.worker(rank), checkpoints.every, checkpoints.resume
        return {"report": report, "checkpoint": WorkerCheckpoint(path=path, every=every, resume=resume, step=step)}

    results = run_workers(job, lambda: [server.connect() for server in servers], own)
    for server in servers:
        server.stop()
    for each in checkpointers:
        each.close()
    return results


def test_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Momentum SGD at the server (3LC) and at the workers (DoubleSqueeze), residuals and bounds on lags both ways.

    Dropout's masks go on where they were.
    """
    two_servers = Job(design="3lc[s=1.75,lag=3]", workers=2, servers=2, steps=STEPS, batch=16)
    for job in (two_servers, Job(design="doublesqueeze-topk", workers=2, steps=STEPS, batch=16, dropout=0.25)):
        [whole, _] = run(job, RunCheckpoints(folder=tmp_path / job.design / "whole", every=EVERY))
        assert isinstance(whole, WorkerOutcome), whole
        interrupted = RunCheckpoints(folder=tmp_path / job.design / "stopped", every=EVERY)
        first = run(job, interrupted, stop=STOP)
        assert all(isinstance(each, Stopped) for each in first), first
        assert interrupted.newest(job) == STOP
        resumed = run(job, RunCheckpoints(folder=interrupted.folder, every=EVERY, resume=True))
        for outcome in resumed:
            assert isinstance(outcome, WorkerOutcome), outcome
            assert (outcome.weights, outcome.steps) == (whole.weights, STEPS), job
        assert isinstance(resumed[0], WorkerOutcome) and resumed[0].train_loss == whole.train_loss
        before, now = whole.traffic, resumed[0].traffic
        assert all(now[name] == before[name] for name in ("payload_bytes_push", "values_push", "steps"))
        # The parameters with which it went on, where servers have them.
        more = now["payload_bytes_pull"] - before["payload_bytes_pull"]
        assert more == 4 * (now["values_pull"] - before["values_pull"]) in (0, 4 * whole.parameters)


def test_newest_step_with_enough_workers_checkpoints(tmp_path: Path) -> None:
    """In an elastic run a dead worker begins with the shards' parameters, without its old files."""
    checkpoints, job = RunCheckpoints(folder=tmp_path, every=10, resume=True), Job(workers=3)
    files = {checkpoints.server(0): (20, 30), checkpoints.worker(0): (20, 30), checkpoints.worker(1): (20, 30)}
    for path, steps in {**files, checkpoints.worker(2): (5, 10)}.items():
        for step in steps:
            checkpoint.write(path, "any", step, {})
    for least in (None, 3):
        with pytest.raises(ConfigError, match="worker-2"):
            checkpoints.newest(job, least)
    assert checkpoints.newest(job, 2) == 30
    late = Job(workers=2)
    checkpoint.write(checkpoints.worker(1), "any", 40, {})
    assert checkpoints.newest(late, 1) == 30, "the step of all workers"
    assert checkpoints.forget_lacking(job, 30) == [2] and checkpoints.forget_lacking(job, None) == []
    assert checkpoint.steps_in(checkpoints.worker(1)) == [40, 30]
    assert checkpoint.steps_in(checkpoints.worker(0)) == [30, 20] and not checkpoint.files_at(checkpoints.worker(2))
    options = [checkpoints.arguments(checkpoints.worker(rank), 30) for rank in (1, 2)]
    assert options[0][-1:] == ["--resume=30"] and options[1][-1] == "10"


def test_resume_of_another_run_raises_config_error(tmp_path: Path) -> None:
    checkpoints = WorkerCheckpoint(path=tmp_path / "file", every=1, resume=True)
    checkpoint.write(checkpoints.path, "worker", 7, checkpoints.state(Job(steps=50), 0, {}))
    assert checkpoints.read(Job(steps=50, link="10mbit"), 0) is not None
    changes: list[tuple[dict[str, Any], str]] = [
        ({"design": "fp32"}, "is of a run with design='3lc.*'; this one has design='fp32'"),
        ({"seed": 3}, "seed=0; this one has seed=3"),
        ({"steps": 99}, "steps=50; this one has steps=99"),
    ]
    for change, text in changes:
        with pytest.raises(ConfigError, match=text):
            checkpoints.read(Job(**{"steps": 50, **change}), 0)
    with pytest.raises(ConfigError, match="rank=0; this one has rank=1"):
        checkpoints.read(Job(steps=50), 1)


@pytest.mark.parametrize("wrote", [False, True])
def test_resume_ignores_states_of_another_run_in_the_file(wrote: bool, tmp_path: Path) -> None:
    job, path = Job(design="3lc", workers=2, steps=50), tmp_path / "worker.checkpoint"
    for step in (30, 40):
        checkpoint.write(path, KIND, step, WorkerCheckpoint.state(job, 0, {"whose": "another run's"}))
    found: list[Any] = []

    def train(kept: WorkerCheckpoint | None) -> Any:
        assert kept is not None
        found.append(kept.steps())
        if len(found) == 2:
            return "done"
        kept.began(0)
        if wrote:
            checkpoint.write(path, KIND, 10, WorkerCheckpoint.state(job, 0, {"whose": "this run's"}))
            kept.written.add(10)
        raise SessionLostError("frozen")

    with pytest.warns(UserWarning, match="This worker joins again"):
        rejoining(train, WorkerCheckpoint(path=path, every=10))
    assert found == [(), (10, 0) if wrote else (0,)]
