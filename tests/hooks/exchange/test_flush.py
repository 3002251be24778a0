"""Uncompressed steps that take what waits in residuals: none of it is lost where NaN comes, and no bucket hangs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.collective.ranks import collectives, tensors
from tests.hooks.ddp_ranks import ddp, mlp, run_ranks, train, weights
from thinwire.collective.core import Bucket, Collective
from thinwire.hooks.exchange.flush import Flush
from thinwire.hooks.exchange.state import ExchangeState

SIZES = {"w": 6_000, "bias": 7}
FIRST, SECOND = Bucket((("bias", 0),), 28), Bucket((("w", 0),), 24_000)


class Driver:
    """Of one rank alone, without threads."""

    peers: Any = None

    def __init__(self, core: Collective) -> None:
        self.core = core

    def flush(self, bucket: Bucket, buffer: torch.Tensor, waiting: set[str]) -> None:
        self.core.flush(bucket, buffer.numpy(), waiting)


@pytest.mark.parametrize("poisoned", [0, 1])
def test_what_was_added_to_a_step_with_nan_in_any_bucket_waits_again(poisoned: int) -> None:
    [core] = collectives(tensors(tw.codec("3lc"), SIZES), 1, skip=True)
    [context] = core.residuals.contexts.values()
    assert context.residual is not None
    context.residual.fill_(0.5)
    flush = Flush(core, Driver(core))  # type: ignore[arg-type]
    flush.expect_all()
    for nan in (True, False):
        for number, bucket in enumerate((FIRST, SECOND)):  # nothing waits for the first one
            gradient = torch.ones(bucket.nbytes // 4)
            flush.add(bucket, gradient)
            assert float(gradient[0]) == (1.5 if number else 1.0)
            if nan and number == poisoned:
                gradient[3] = torch.nan
            flush.reduced(gradient)
        flush.settle()
        assert flush.waiting is nan and not flush.undone
        assert (context.residual == (0.5 if nan else 0.0)).all()


def test_what_a_skipped_step_gives_back_is_in_units_of_the_next_loss_scale() -> None:
    [core] = collectives(tensors(tw.codec("3lc"), SIZES), 1, skip=True)
    [context] = core.residuals.contexts.values()
    assert context.residual is not None
    context.residual.fill_(0.5)
    flush = Flush(core, Driver(core))  # type: ignore[arg-type]
    flush.expect_all()
    gradient = torch.ones(SECOND.nbytes // 4)
    flush.add(SECOND, gradient)
    flush.reduced(gradient.fill_(torch.inf))
    scaler = SimpleNamespace(get_scale=lambda: 512.0)  # halved, as it skips that step
    auto = SimpleNamespace(settle=flush.settle)
    driver = SimpleNamespace(settle=lambda: None)
    state: Any = SimpleNamespace(core=core, driver=driver, auto=auto, _scaler=scaler, _loss_scale=1024.0, _guard=None)
    ExchangeState.follow_loss_scale(state)
    assert (context.residual == 0.25).all()


class Slow:
    """A finite average, and another with NaN that comes in another thread while this one is looked at."""

    def __init__(self, flush: Flush) -> None:
        self.flush = flush

    is_cuda = False

    def sum(self) -> torch.Tensor:
        self.flush.reduced(torch.full((1,), torch.nan))
        return torch.ones(1)


def test_nan_that_comes_while_a_finite_average_is_looked_at_is_not_forgotten() -> None:
    """Averages come in gloo's threads and in the backward pass's; the interpreter's lock is free during `sum`."""
    [core] = collectives(tensors(tw.codec("3lc"), SIZES), 1, skip=True)
    flush = Flush(core, Driver(core))  # type: ignore[arg-type]
    flush.expect_all()
    flush.reduced(Slow(flush))  # type: ignore[arg-type]
    assert flush.undone


def test_finite_averages_whose_sum_overflows_are_taken() -> None:
    [core] = collectives(tensors(tw.codec("3lc"), SIZES), 1, skip=True)
    flush = Flush(core, Driver(core))  # type: ignore[arg-type]
    flush.reduced(torch.full((9,), 3e38))
    flush.reduced(torch.full((9,), 6e4, dtype=torch.float16))
    assert not flush.undone
    flush.reduced(torch.tensor([torch.inf, -torch.inf]))
    assert flush.undone


def run_unmeasured(rank: int) -> dict[str, Any]:
    """A step that nobody measures takes what waits for its last bucket; then one with NaN in the first alone."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
    state = ddp.compress(model, "auto", measure_link=False, last_layer="fp32", nonfinite="skip")
    auto = state.auto
    assert auto is not None
    auto.pilot._decide = lambda: None  # type: ignore[method-assign]
    auto.pilot.take = lambda notes, level: None  # type: ignore[method-assign]
    auto.pilot._count_down = lambda *_: None  # type: ignore[method-assign]
    auto.pilot.memory.note_gap, auto.pilot.memory.doubts, auto.pilot.memory.probe = 100, 0, False
    found: dict[str, Any] = {"waits": [], "watched": []}
    contexts = [each for each in state.core.residuals.contexts.values() if each.residual is not None]
    last = model.module.get_submodule("5").weight
    assert isinstance(last, torch.Tensor)
    for step in range(5):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for context in contexts if step > 1 else []:
            assert context.residual is not None
            context.residual.fill_(0.25)
        if step > 1:  # by then DDP has rebuilt its buckets
            auto.flush.expect_all()
        poison = last.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[no-untyped-call]
        if step != 3 or rank:
            poison.remove()
        train(model, rank, 1, first=step)
        poison.remove()
        found["watched"].append(auto.watched)
        auto.settle()
        found["waits"].append(
            max(float(context.residual.max()) for context in contexts if context.residual is not None)
        )
        if step == 3:  # the optimizer would have been kept from it
            model.load_state_dict(before)
    found["weights"] = weights(model.module)
    return found


def test_a_step_that_nobody_measures_takes_what_waits_and_gives_it_back_where_it_is_skipped() -> None:
    first, second = run_ranks(2, run_unmeasured)
    assert first["waits"] == second["waits"] == [0.0, 0.0, 0.0, 0.25, 0.0]
    assert not any(first["watched"])
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]) and value.isfinite().all(), name


def test_averages_on_a_gpu_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is waited for, and a step has an average for every bucket."""
    [core] = collectives(tensors(tw.codec("3lc"), SIZES), 1, skip=True)
    asked, ask = list[torch.Tensor](), torch.Tensor.__bool__

    def noted(self: torch.Tensor) -> bool:
        asked.append(self)
        return ask(self)

    monkeypatch.setattr(torch.Tensor, "__bool__", noted)
    for finite in (True, False):
        flush = Flush(core, Driver(core))  # type: ignore[arg-type]
        flush._finite = [torch.tensor(True), torch.tensor(finite), torch.tensor(True)]
        assert flush.look() is not finite
    assert len(asked) == 2
