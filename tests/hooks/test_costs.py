"""Which steps and bytes are counted as a training's costs; what a real training reports is in test_report.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from thinwire.hooks.costs import TrainingCosts
from thinwire.telemetry import warm_up_steps


def made(**shards: Any) -> tuple[SimpleNamespace, TrainingCosts]:
    """A worker that counts what the test says, with one trained tensor of 400 bytes and a buffer, and its costs."""
    sums: dict[str, float] = {}
    tensors = [SimpleNamespace(shown=torch.zeros(100), state=state) for state in (False, True)]
    counters = SimpleNamespace(sums=sums, snapshot=lambda: dict(sums))
    worker: Any = SimpleNamespace(iteration=5, counters=counters, model=SimpleNamespace(tensors=tensors))
    driver: Any = SimpleNamespace(wire_nbytes=(10, 20), connections=["a", "b"])
    group: Any = SimpleNamespace(**shards) if shards else None
    return worker, TrainingCosts(worker, driver, group)


def take(worker: SimpleNamespace, costs: TrainingCosts, steps: int) -> None:
    for _ in range(steps):
        worker.iteration += 1
        worker.counters.sums["exchange_seconds"] = worker.counters.sums.get("exchange_seconds", 0.0) + 2.0
        costs.note_step()


def test_steps_before_it_began_and_of_other_states_are_not_counted() -> None:
    worker, costs = made()
    worker.iteration = 40  # a state was loaded, and shards told where the others are
    costs.begin()
    assert costs.report().steps == 0
    take(worker, costs, 3)
    worker.iteration += 1000  # a state of other steps
    costs.pass_over(1000)
    take(worker, costs, 9)
    report = costs.report()
    assert report.steps == 12 - warm_up_steps(12)
    assert report.seconds - report.compute_s == 2.0


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
