"""One run in one process: the weights of a run with processes, and failures that reach everybody."""

from __future__ import annotations

import threading

import pytest

from thinwire.errors import ConfigError, EngineError
from thinwire.jobs import in_process
from thinwire.jobs import run as experiment
from thinwire.jobs.job import Job
from thinwire.workloads import batches


@pytest.mark.parametrize("design", ["3lc[s=1.75]", "terngrad"])
def test_the_outcome_is_that_of_a_run_with_processes(design: str) -> None:
    job = Job(design=design, workers=2, servers=2, steps=12, seed=3)
    inside, outside = in_process.run(job), experiment.run(job)
    assert inside.pop("in_process") is True
    # Sessions over gRPC may outlive their connections, and say a little more for it.
    others = {key for key in outside if "seconds" not in key and "wire" not in key and key != "curve"}
    assert {key: inside[key] for key in others} == {key: outside[key] for key in others}
    assert inside["weights"] == outside["weights"] and inside["steps"] == 12


def test_events_say_whose_they_are() -> None:
    heard: list[tuple[str, str]] = []
    in_process.run(Job(workers=2, steps=3), on_event=lambda process, event: heard.append((process, event["event"])))
    assert {("worker 0", "done"), ("worker 1", "done"), ("worker 0", "accuracy")} <= set(heard)


@pytest.mark.parametrize("job", [Job(link="10mbit", steps=3), Job(seconds=1.0)])
def test_what_only_processes_can_show_is_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match="neither a link nor a time budget"):
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
