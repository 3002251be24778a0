"""The report of `tw.distribute`: which steps and bytes count as a training's costs, and what a training reports."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, inner_step, mlp
from thinwire.collective.residuals import Residuals, TrainedTensor
from thinwire.hooks.costs import TrainingCosts
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.report import TrainingReport
from thinwire.policies.compression import Choice, codec_by_name
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


def take(worker: SimpleNamespace, costs: TrainingCosts, steps: int, h: int = 0) -> None:
    """Exchanges in every step, of 2 s; or after every h steps, answered `delay` + 1 steps later.

    Either end of the first two such exchanges takes 100 s, as kernels compile, and of the others 1 s.
    """
    sums = worker.counters.sums
    for _ in range(steps):
        worker.iteration += 1
        taken, seconds = worker.iteration - 5, 2.0
        worker.clock += not h or taken % h == 0
        if h:
            ends = (taken % h == 0) + (taken > h and (taken - worker.delay) % h == 1)
            seconds = ends * (100.0 if worker.clock - 5 <= 2 else 1.0)
        sums["exchange_seconds"] = sums.get("exchange_seconds", 0.0) + seconds
        costs.note_step()


def test_steps_before_begin_and_of_loaded_states_are_not_counted() -> None:
    worker, costs = made()
    worker.iteration = 40  # a state was loaded, and shards told where the others are
    worker.counters.sums |= {"exchange_seconds": 50.0, "wait_seconds": 40.0}  # for them to come
    costs.begin()
    assert (costs.traffic()["wait_seconds"], costs.report().steps) == (0, 0)
    take(worker, costs, 3)
    worker.iteration += 1000  # a state of other steps
    costs.pass_over(1000)
    take(worker, costs, 9)
    report = costs.report()
    assert report.steps == 12 - warm_up_steps(12)
    assert report.warm_up_s == report.seconds - report.compute_s == 2.0


@pytest.mark.parametrize("delay", [0, 3])
def test_first_two_exchanges_of_local_updates_are_left_out_with_their_answers(delay: int) -> None:
    """Kernels compile in them, which with h=10 is after the first five steps."""
    worker, costs = made()
    worker.delay = delay
    costs.begin()
    for taken, steps, warm_up, compiling in (
        (9, 5, 4, False),  # no exchange yet
        (10, 14, 5, True),  # the only exchange is not left out
        (10, 18 - delay, 11 + delay, True),
        (11, 19 - delay, 21 + delay, False),
    ):
        take(worker, costs, taken, h=10)
        report = costs.report()
        assert (report.steps, report.warm_up, report.compiling) == (steps, warm_up, compiling)
        assert f"  left out         the first {warm_up} steps, " in str(report)
    assert report.steps * (report.seconds - report.compute_s) == pytest.approx(3.0), "of two exchanges and an answer"
    assert report.warm_up_s == pytest.approx(400 / report.warm_up)
    take(worker, costs, 60, h=10)
    assert costs.report().warm_up == 21 + delay, "no more than two are left out"


def test_worker_alone_counts_its_own_bytes_and_a_rank_in_a_group_those_it_serves_too() -> None:
    worker, costs = made()
    worker.counters.sums["void_rounds"] = 3.0
    assert costs.traffic() == {"void_rounds": 3.0, "wire_bytes_push": 10, "wire_bytes_pull": 20}
    assert costs.report().uncompressed_nbytes == 400 and costs.report().void_rounds == 3
    _, costs = made(workers=4, wire_nbytes=lambda connections: (7 * len(connections), 8))
    assert costs.traffic() == {"wire_bytes_push": 14, "wire_bytes_pull": 8}
    assert costs.report().uncompressed_nbytes == 2 * 400 * 3 // 4


def test_training_reports_bytes_and_times() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[TrainingReport, TrainingReport, int]:
        before = opt.report()
        for step in range(9):
            inner_step(model, opt, rank, step)
        return before, opt.report(), sum(parameter.numel() for parameter in model.parameters())

    found, _ = run_cluster(mlp, train, optimizer=adamw, design="local-sgd[h=2]")
    for before, after, values in found:
        assert str(before) == "thinwire: no step yet after the first" and before.compute_share == 0
        assert (after.steps, after.void_rounds) == (4, 0), "two exchanges, with the step that takes the second's answer"
        assert (after.warm_up, after.compiling) == (5, False) and after.warm_up_s > 0
        assert re.search(r"\n  left out         the first 5 steps, with [0-9.]+ m?s each of exchanging", str(after))
        assert after.uncompressed_nbytes >= 4 * values
        assert after.sent_nbytes > 0 and after.received_nbytes > 0 and after.ratio > 1
        assert after.compute_s + after.encode_s + after.decode_s + after.wait_s <= after.seconds * (1 + 1e-6)
        assert 0 < after.compute_share < 1 and after.compute_share == pytest.approx(after.compute_s / after.seconds)


def test_uncompressed_bytes_are_of_the_tensors_own_dtypes() -> None:
    """Plain DDP sends a bf16 gradient in 2 bytes a value; 1 byte a value is then half of it, not a quarter."""
    choice = Choice(codec_by_name("int8"), codec_by_name("int8"))
    for dtype, itemsize in ((torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4), (torch.float64, 8)):
        residuals = Residuals([TrainedTensor("weight", 1000, dtype, choice)], 0, 4, mean=True, seed=0)
        for pulls, passes in ((True, 2), (False, 1)):
            hook = SimpleNamespace(core=SimpleNamespace(residuals=residuals, pulls=pulls))
            nbytes = ExchangeState.__dict__["uncompressed_nbytes"].fget(hook)
            assert nbytes == passes * 3 / 4 * 1000 * itemsize, dtype
