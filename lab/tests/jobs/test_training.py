"""Real training in one process: a server core, two workers as threads, packaged data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.tests.jobs.workers import run_workers
from thinwire.engines.events import Event
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection, Server
from thinwire.transports.grpc import server as grpc_server
from thinwire.transports.memory import MemoryServer
from thinwire_lab.jobs.events import Accuracy
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome
from thinwire_lab.workloads.evaluate import evaluate

torch.set_num_threads(1)


def train(
    job: Job, transport: str = "memory", clocks: Sequence[Callable[[], float]] = ()
) -> tuple[list[WorkerOutcome], list[Event]]:
    """Runs a job; returns the workers' outcomes and their events."""
    core = ServerCore()
    server: Server
    if transport == "memory":
        server = memory = MemoryServer(serving(core))
    else:
        server = grpc_server.serve(serving(core), "127.0.0.1:0")

    def connect() -> list[str | Connection]:
        return [memory.connect() if transport == "memory" else f"grpc://{server.address}"]

    events: list[Event] = []
    times = clocks or [time.perf_counter] * job.workers
    with server:
        results = run_workers(job, connect, lambda rank: {"report": events.append, "now": times[rank]})
    outcomes = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        outcomes.append(result)
    assert core.finished
    return outcomes, events


def test_training_result_depends_on_the_seed_not_the_transport() -> None:
    for design in ("3lc[s=1.75]", "int8"):
        job = Job(design=design, workers=2, steps=15)
        (first, second), _ = train(job)
        (again, _), _ = train(job)
        (wired, _), _ = train(job, "grpc")
        (other, _), _ = train(replace(job, seed=1))
        assert first.weights == second.weights, "the replicas are equal bit for bit"
        assert first.weights == again.weights == wired.weights != other.weights, design
        assert first.test_accuracy == again.test_accuracy == wired.test_accuracy
        assert first.train_loss == again.train_loss
        for key in ("payload_bytes_push", "values_push", "values_pull", "steps"):
            assert first.traffic[key] == wired.traffic[key] > 0, key


class Clock:
    """Advances by a second at every call."""

    seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def test_training_seconds_leave_out_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[dict[str, Any]] = [{"steps": 20}, {"seconds": 60.0}]
    for length in cases:
        clocks = [Clock(), Clock()]

        def slowly(*args: Any, clocks: list[Clock] = clocks) -> Any:
            for clock in clocks:  # all wait for worker 0
                clock.seconds += 1000
            return evaluate(*args)

        job = Job(design="fp32", workers=2, batch=16, **length)
        (never, _), _ = train(job, clocks=[Clock(), Clock()])
        monkeypatch.setattr("thinwire_lab.jobs.training_loop.evaluate", slowly)
        (outcome, other), events = train(replace(job, eval_steps=2), clocks=clocks)
        points = [event for event in events if isinstance(event, Accuracy)]
        assert len(points) > 5 and clocks[0].seconds > 5000
        assert {point.step for point in points} == {*range(2, outcome.steps + 1, 2), outcome.steps}, "each once"
        assert outcome.seconds < 200 and outcome.seconds_per_step < 10
        assert all(point.seconds <= outcome.seconds for point in points)
        assert outcome.steps == other.steps and outcome.weights == other.weights
        if "seconds" in length:
            assert outcome.seconds >= 60
            assert outcome.steps > 0.7 * never.steps, "it looks at its clock once or twice more"


def test_averaged_parameters_follow_the_model() -> None:
    (short, _), _ = train(Job(design="terngrad[ema=0.5]", workers=2, steps=60))
    (slow, _), _ = train(Job(design="terngrad[ema=0.9999]", workers=2, steps=60))
    assert isinstance(short.test_accuracy, float) and isinstance(short.test_accuracy_ema, float)
    # A short average ends near the model, and far from the weights it started with, which know nothing.
    assert short.test_accuracy > 0.5
    assert abs(short.test_accuracy_ema - short.test_accuracy) < 0.15
    assert slow.weights == short.weights, "the average is beside the training"
    assert isinstance(slow.test_accuracy_ema, float)
    assert slow.test_accuracy_ema < 0.4, "a long average has not left the first weights yet"
