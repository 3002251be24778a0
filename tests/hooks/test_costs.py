"""Which steps and bytes are counted as a training's costs; what a real training reports is in test_report.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.hooks.costs import TrainingCosts
from thinwire.telemetry import warm_up_steps


def made(**shards: Any) -> tuple[SimpleNamespace, TrainingCosts]:
    """A worker that counts what the test says, with one trained tensor of 400 bytes and a buffer, and its costs."""
    sums: dict[str, float] = {}
    tensors = [SimpleNamespace(shown=torch.zeros(100), state=state) for state in (False, True)]
    counters = SimpleNamespace(sums=sums, snapshot=lambda: dict(sums))
    model = SimpleNamespace(tensors=tensors)
    worker: Any = SimpleNamespace(iteration=5, clock=5, delay=0, counters=counters, model=model)
    driver: Any = SimpleNamespace(wire_nbytes=(10, 20), connections=["a", "b"])
    group: Any = SimpleNamespace(**shards) if shards else None
    return worker, TrainingCosts(worker, driver, group)


def take(worker: SimpleNamespace, costs: TrainingCosts, steps: int) -> None:
    for _ in range(steps):
        worker.iteration, worker.clock = worker.iteration + 1, worker.clock + 1
        worker.counters.sums["exchange_seconds"] = worker.counters.sums.get("exchange_seconds", 0.0) + 2.0
        costs.note_step()


def take_locally(worker: SimpleNamespace, costs: TrainingCosts, steps: int, h: int) -> None:
    """An exchange after every h steps, answered `delay` + 1 steps later; either end of the first two takes 100 s."""
    sums = worker.counters.sums
    for _ in range(steps):
        worker.iteration += 1
        taken = worker.iteration - 5
        exchanged, answered = taken % h == 0, taken > h and (taken - worker.delay) % h == 1
        worker.clock += exchanged
        number = worker.clock - 5
        sums["exchange_seconds"] = sums.get("exchange_seconds", 0.0) + (exchanged + answered) * (
            100.0 if number <= 2 else 1.0
        )
        costs.note_step()


def test_steps_before_it_began_and_of_other_states_are_not_counted() -> None:
    worker, costs = made()
    worker.iteration = 40  # a state was loaded, and shards told where the others are
    worker.counters.sums |= {"exchange_seconds": 50.0, "wait_seconds": 40.0}  # for them to come
    costs.begin()
    assert (costs.traffic()["wait_seconds"], costs.report().steps) == (0, 0)
    assert costs.report().steps == 0
    take(worker, costs, 3)
    worker.iteration += 1000  # a state of other steps
    costs.pass_over(1000)
    take(worker, costs, 9)
    report = costs.report()
    assert report.steps == 12 - warm_up_steps(12)
    assert report.warm_up_s == 2.0
    assert report.seconds - report.compute_s == 2.0


@pytest.mark.parametrize("delay", [0, 3])
def test_of_local_updates_the_first_two_exchanges_are_left_out_with_their_answers(delay: int) -> None:
    """Kernels compile in them, which with h=10 is after the first five steps."""
    worker, costs = made()
    worker.delay = delay
    costs.begin()
    take_locally(worker, costs, 9, h=10)
    report = costs.report()
    assert (report.steps, report.warm_up, report.compiling) == (5, 4, False), "nothing was exchanged"
    assert "  left out         the first 4 steps, with 0 ms each of exchanging and compiling" in str(report)
    take_locally(worker, costs, 10, h=10)
    report = costs.report()
    assert (report.steps, report.warm_up, report.compiling) == (14, 5, True), "the only exchange is not left out"
    assert "  left out         the first 5 steps, but kernels compile in two exchanges" in str(report)
    take_locally(worker, costs, 10, h=10)
    report = costs.report()
    assert (report.steps, report.warm_up, report.compiling) == (18 - delay, 11 + delay, True)
    take_locally(worker, costs, 11, h=10)
    report = costs.report()
    assert (report.steps, report.warm_up, report.compiling) == (19 - delay, 21 + delay, False)
    assert report.steps * (report.seconds - report.compute_s) == pytest.approx(3.0), "of two exchanges and an answer"
    assert report.warm_up_s == pytest.approx(400 / report.warm_up)
    take_locally(worker, costs, 60, h=10)
    assert costs.report().warm_up == 21 + delay, "no more than two are left out"


def test_of_a_worker_alone_its_own_way_is_counted() -> None:
    worker, costs = made()
    worker.counters.sums["void_rounds"] = 3.0
    assert costs.traffic() == {"void_rounds": 3.0, "wire_bytes_push": 10, "wire_bytes_pull": 20}
    report = costs.report()
    assert report.uncompressed_nbytes == 400 and report.void_rounds == 3


def test_in_a_group_what_a_rank_serves_is_counted_too() -> None:
    _, costs = made(workers=4, wire_nbytes=lambda connections: (7 * len(connections), 8))
    assert costs.traffic() == {"wire_bytes_push": 14, "wire_bytes_pull": 8}
    assert costs.report().uncompressed_nbytes == 2 * 400 * 3 // 4
