"""A run that was stopped and resumed ends with the bits of one that never was; files that do not fit are refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.jobs.checkpoints import RunCheckpoints, WorkerCheckpoint
from thinwire.jobs.job import Job
from thinwire.jobs.training import run_worker
from thinwire.runtime import checkpoint
from thinwire.runtime.checkpointing import Checkpointer
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection
from thinwire.transports.memory import MemoryServer

STEPS, EVERY, STOP = 9, 2, 4


class Stopped(Exception):
    pass


def run(job: Job, keep: RunCheckpoints, *, stop: int | None = None) -> list[dict[str, Any] | BaseException]:
    """Trains in threads, with files; with `stop`, every worker dies after its checkpoint of that step."""
    keep.check(job)
    step = keep.newest(job) if keep.resume else None
    servers = []
    for index in range(job.servers):
        core = ServerCore()
        checkpointer = Checkpointer(core, keep.server(index), keep.every)
        if step is not None:
            checkpointer.resume(step)
        servers.append(MemoryServer(serving(core, checkpointer=checkpointer)))
    results: list[Any] = [None] * job.workers
    # torch has one random generator in a process, and models are built with it: worker 0, whose weights become
    # everybody's, builds its own before the other threads may touch the generator.
    built = threading.Event()

    def connections() -> list[str | Connection]:
        built.set()
        return [server.connect() for server in servers]

    def work(rank: int) -> None:
        def report(event: dict[str, Any]) -> None:
            if event["event"] == "kept" and event["step"] == stop:
                raise Stopped

        mine = WorkerCheckpoint(path=keep.worker(rank), every=keep.every, resume=keep.resume, step=step)
        try:
            if rank:
                built.wait()
            results[rank] = run_worker(job, rank=rank, servers=connections, report=report, keep=mine)
        except BaseException as error:
            results[rank] = error
            built.set()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(job.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in servers:
        server.stop()
    return results


@pytest.mark.parametrize(
    ("design", "more"),
    [
        ("3lc[s=1.75]", {}),
        ("3lc[s=1.75]", {"servers": 2}),
        ("3lc[s=1.0]", {"consistency": "local[2]"}),
        ("doublesqueeze-topk", {}),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(design: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Momentum SGD at the server (3LC) and at the workers (DoubleSqueeze), residuals both ways."""
    job = Job(design=design, workers=2, steps=STEPS, batch=16, **more)
    [whole, _] = run(job, RunCheckpoints(folder=tmp_path / "whole", every=EVERY))
    assert isinstance(whole, dict), whole
    kept = RunCheckpoints(folder=tmp_path / "stopped", every=EVERY)
    first = run(job, kept, stop=STOP)
    assert all(isinstance(each, Stopped) for each in first), first
    assert kept.newest(job) == STOP
    results = run(job, RunCheckpoints(folder=kept.folder, every=EVERY, resume=True))
    for result in results:
        assert isinstance(result, dict), result
        assert result["weights"] == whole["weights"] and result["steps"] == STEPS
    assert isinstance(results[0], dict) and results[0]["train_loss"] == whole["train_loss"]


def test_the_newest_step_that_all_have(tmp_path: Path) -> None:
    keep, job = RunCheckpoints(folder=tmp_path, every=10), Job(workers=2)
    with pytest.raises(ConfigError, match=r"no step in .* can be resumed.*server-0.checkpoint: none, worker-0"):
        keep.newest(job)
    for path, steps in ((keep.server(0), (10, 20)), (keep.worker(0), (10, 20)), (keep.worker(1), (10,))):
        for step in steps:
            checkpoint.write(path, "any", step, {})
    assert keep.newest(job) == 10
    checkpoint.write(keep.worker(1), "any", 20, {})
    assert keep.newest(job) == 20


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"design": "fp32"}, "is of a run with design='3lc.*'; this one has design='fp32'"),
        ({"seed": 3}, "seed=0; this one has seed=3"),
        ({"steps": 99}, "steps=50; this one has steps=99"),
    ],
)
def test_another_run_is_refused(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    keep = WorkerCheckpoint(path=tmp_path / "file", every=1, resume=True)
    keep.write(7, Job(steps=50), 0, {})
    assert keep.read(Job(steps=50, link="10mbit"), 0) is not None
    with pytest.raises(ConfigError, match=text):
        keep.read(Job(**{"steps": 50, **change}), 0)
    with pytest.raises(ConfigError, match="rank=0; this one has rank=1"):
        keep.read(Job(steps=50), 1)


def test_runs_without_a_step_to_go_back_to(tmp_path: Path) -> None:
    keep = RunCheckpoints(folder=tmp_path / "new" / "folder")
    with pytest.raises(ConfigError, match="the rate follows the clock"):
        keep.check(Job(seconds=5))
    with pytest.raises(ConfigError, match="asp has none"):
        keep.check(Job(consistency="asp"))
    keep.check(Job(steps=5))
    assert keep.folder.is_dir()
