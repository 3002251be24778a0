"""Real training in one process: a server core, two workers as threads, the data that ships."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import UNSET

from thinwire.engines.events import Event
from thinwire.errors import TransportError
from thinwire.packets import parse
from thinwire.runtime.serving import serving
from thinwire.schema import Join, Refused
from thinwire.server.core import ServerCore
from thinwire.server.effects import Close, Send
from thinwire.transports.base import Connection, Server
from thinwire.transports.grpc import server as grpc_server
from thinwire.transports.links import Rate
from thinwire.transports.memory import MemoryServer
from thinwire_lab.jobs.events import Accuracy, Done
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome, summarise
from thinwire_lab.jobs.training import run_worker
from thinwire_lab.workloads.evaluate import evaluate

PATIENCE_S = 120.0
"""How long a thread of a training may take, where kernels compile beside other work: half a minute was not enough."""

torch.set_num_threads(1)


def train(
    job: Job, transport: str = "memory", clocks: Sequence[Callable[[], float]] = ()
) -> tuple[list[WorkerOutcome], list[Event]]:
    """Runs a job; returns the workers' outcomes and everything that was reported."""
    core = ServerCore()
    server: Server
    if transport == "memory":
        server = memory = MemoryServer(serving(core))
    else:
        server = grpc_server.serve(serving(core), "127.0.0.1:0")
    # torch has one random generator in a process, and models are built with it: worker 0, whose weights become
    # everybody's, builds its own before the other threads may touch the generator.
    built = threading.Event()

    def servers() -> list[str | Connection]:
        built.set()
        return [memory.connect() if transport == "memory" else f"grpc://{server.address}"]

    outcomes: dict[int, WorkerOutcome] = {}
    events: list[Event] = []
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            if rank:
                built.wait()
            now = clocks[rank] if clocks else time.perf_counter
            outcomes[rank] = run_worker(job, rank=rank, servers=servers, report=events.append, now=now)
        except BaseException as error:
            failures.append(error)
            built.set()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(job.workers)]
    with server:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    assert core.finished
    return [outcomes[rank] for rank in range(job.workers)], events


def test_one_seed_one_result_over_any_transport() -> None:
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


def test_3lc_learns() -> None:
    (outcome, _), events = train(Job(design="3lc[s=1.0]", workers=2, steps=300))
    assert isinstance(outcome.test_accuracy, float) and outcome.test_accuracy > 0.8
    assert isinstance(outcome.train_loss, float) and outcome.train_loss < 1.0
    assert sum(isinstance(event, Done) for event in events) == 2
    bits = 8 * outcome.traffic["payload_bytes_push"] / outcome.traffic["values_push"]
    assert bits < 2.5, "compressed while it learned; biases travel as they are"
    assert outcome.residual_ratio and all(ratio >= 0 for ratio in outcome.residual_ratio.values())


def test_the_last_step_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return evaluate(*args)

    monkeypatch.setattr("thinwire_lab.jobs.training_loop.evaluate", counted)
    lengths: list[dict[str, Any]] = [{"steps": 4}, {"seconds": 40.0}]
    for length in lengths:
        calls.clear()
        job = Job(design="fp32", workers=2, batch=16, eval_steps=2, **length)
        (outcome, _), events = train(job, clocks=[Clock(), Clock()])
        points = [event for event in events if isinstance(event, Accuracy)]
        steps = [event.step for event in points]
        assert steps == sorted({*range(2, outcome.steps + 1, 2), outcome.steps}) and len(calls) == len(steps)
        assert points[-1].accuracy == outcome.test_accuracy


def lose_worker_zero(design: str) -> None:
    job = Job(design=design, workers=3, steps=12, batch=16)
    outcomes: list[Any] = [None] * 3
    events: list[Event] = []
    built = threading.Event()
    server = MemoryServer(serving(ServerCore(min_workers=2), grace_s=0.0))

    def dies(rank: int, step: int, _loss: float, _model: torch.nn.Module) -> None:
        if rank == 0 and step == 2:
            raise RuntimeError("worker 0 dies")

    def connections() -> list[str | Connection]:
        built.set()
        return [server.connect()]

    def work(rank: int) -> None:
        if rank:
            built.wait(PATIENCE_S)
        try:
            outcomes[rank] = run_worker(job, rank=rank, servers=connections, report=events.append, on_step=dies)
        except RuntimeError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    with server, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # who is gone is said
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert isinstance(outcomes[0], RuntimeError)
    found = summarise(job, outcomes[1:], rate=Rate(None), shaping="none")
    assert found.test_accuracy == outcomes[1].test_accuracy and outcomes[2].test_accuracy is UNSET
    assert [each.step for each in events if isinstance(each, Accuracy)] == [12] == [found.steps]
    assert (found.lost_workers, isinstance(found.test_accuracy_ema, float)) == (1, "ema" in design)


def test_where_worker_zero_was_lost_the_lowest_rank_left_evaluates() -> None:
    for design in ["3lc[s=1.0]", "terngrad[ema=0.5]", "local-sgd[h=4]"]:
        lose_worker_zero(design)


class Clock:
    """Goes on by a second whenever somebody looks; once it has stopped it stands still."""

    def __init__(self, *, stopped: bool = False) -> None:
        self.seconds, self._stopped = 0.0, stopped

    def __call__(self) -> float:
        self.seconds += not self._stopped
        return self.seconds


def test_evaluations_take_no_time_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert outcome.seconds < 200 and outcome.seconds_per_step < 10
        assert all(point.seconds <= outcome.seconds for point in points)
        assert outcome.steps == other.steps and outcome.weights == other.weights
        if "seconds" in length:
            assert outcome.seconds >= 60
            assert outcome.steps > 0.7 * never.steps, "it looks at its clock once or twice more"


@pytest.mark.parametrize("eval_steps", [0, 5])
def test_a_time_budget_ends_without_worker_zero_and_does_not_begin_anew_with_one_that_comes_late(
    eval_steps: int,
) -> None:
    job = Job(design="fp32", workers=2, seconds=150.0, batch=4, eval_steps=eval_steps)
    core = ServerCore(min_workers=1)
    came = threading.Event()
    outcomes: list[Any] = [None, None, None]
    server = MemoryServer(serving(core, grace_s=0.0))

    def dies_or_waits(rank: int, step: int, _loss: float, _model: torch.nn.Module) -> None:
        if rank == 0 and step == 2:
            raise RuntimeError("worker 0 dies")
        if rank == 1 and step == 6:
            assert came.wait(PATIENCE_S)

    def work(life: int, rank: int, now: Clock) -> None:
        def comes(_rank: int, _step: int, _loss: float, _model: torch.nn.Module) -> None:
            came.set()

        try:
            outcomes[life] = run_worker(
                job,
                rank=rank,
                servers=[server.connect()],
                report=lambda event: None,
                on_step=comes if life == 2 else dies_or_waits,
                now=now,
            )
        except RuntimeError as error:
            outcomes[life] = error

    threads = [threading.Thread(target=work, args=(rank, rank, Clock()), daemon=True) for rank in range(2)]
    with server, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        threads[0].join(PATIENCE_S)
        threads[0] = threading.Thread(target=work, args=(2, 0, Clock(stopped=True)), daemon=True)
        threads[0].start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "it never ends"
    died, survivor, late = outcomes
    assert isinstance(died, RuntimeError) and survivor.seconds >= 150
    assert (late.steps, late.weights) == (survivor.steps, survivor.weights)
    assert any("does not know how long they took" in str(each.message) for each in said)


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


class FirstWords(Connection):
    """Keeps what a worker says first, and breaks."""

    address, packet = "nowhere", b""

    def send(self, packet: bytes) -> None:
        self.packet = self.packet or packet  # the last one is a goodbye

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        raise TransportError("that was enough")

    def close(self, timeout_s: float = 30.0) -> None:
        pass

    def abort(self) -> None:
        pass


def join_of(job: Job, rank: int) -> Join:
    connection = FirstWords()
    with pytest.raises(TransportError, match="that was enough"):
        run_worker(job, rank=rank, servers=[connection], report=lambda event: None)
    message, _ = parse(connection.packet)
    assert isinstance(message, Join)
    return message


def test_a_worker_that_was_started_otherwise_is_refused_by_the_settings_name() -> None:
    job, core = Job(design="fp32", workers=2, steps=40), ServerCore()
    assert isinstance(core.received(0, join_of(job, 0))[0], Send)
    for name, other in (
        ("seed", replace(job, seed=1)),
        ("batch", replace(job, batch=7)),
        ("steps", replace(job, steps=41)),
        ("seconds", replace(job, steps=None, seconds=5.0)),
        ("learning rate", replace(job, lr=0.5)),
        ("optimizer", replace(job, optimizer="Adam")),
        ("dropout", replace(job, dropout=0.4)),
        ("segments", replace(job, segments="fixed")),
    ):
        [refusal] = core.received(1, join_of(other, 1))
        assert isinstance(refusal, Close) and isinstance(refusal.message, Refused)
        assert refusal.message.reason.startswith(f"{name}: this worker "), refusal
    assert isinstance(core.received(1, join_of(job, 1))[0], Send)
