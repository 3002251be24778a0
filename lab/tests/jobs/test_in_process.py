"""One run in one process: whose events are whose, and failures that reach everybody. test_cluster has its weights."""

from __future__ import annotations

import threading

import pytest

from thinwire.errors import ConfigError, EngineError
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.job import Job
from thinwire_lab.workloads import batches


def test_what_only_processes_can_show_is_refused() -> None:
    for job in (Job(link="10mbit", steps=3), Job(seconds=1.0)):
        with pytest.raises(ConfigError, match="link"):
            in_process.run(job)


def test_a_worker_that_fails_ends_the_run_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = batches.Batches.__next__
    calls = iter(range(1000))

    def fail_late(self: batches.Batches) -> object:
        if next(calls) == 7:
            raise ConfigError("no more batches")
        return taken(self)

    monkeypatch.setattr(batches.Batches, "__next__", fail_late)
    with pytest.raises(EngineError, match="a worker failed"):
        in_process.run(Job(workers=3, steps=100))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker")]
