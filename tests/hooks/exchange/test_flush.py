"""Uncompressed steps add residuals to gradients, and restore them after NaN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.collective.ranks import collectives, tensors
from thinwire.collective.core import Bucket, Collective
from thinwire.hooks.exchange.flush import Flush
from thinwire.hooks.exchange.state import ExchangeState

SIZES = {"w": 6_000, "bias": 7}
FIRST, SECOND = Bucket((("bias", 0),), 28), Bucket((("w", 0),), 24_000)


class Driver:
    """One rank alone, without threads."""

    peers: Any = None

    def __init__(self, core: Collective) -> None:
        self.core = core

    def flush(self, bucket: Bucket, buffer: torch.Tensor, waiting: set[str]) -> None:
        self.core.flush(bucket, buffer.numpy(), waiting)


def core_of_one_rank(residual: float = 0.0) -> tuple[Collective, torch.Tensor]:
    """A core that skips steps with NaN, and its one residual."""
    [core] = collectives(tensors(tw.codec("3lc"), SIZES), 1, skip=True)
    [context] = core.residuals.contexts.values()
    assert context.residual is not None
    return core, context.residual.fill_(residual)


def flush_of(core: Collective) -> Flush:
    flush = Flush(core, Driver(core))  # type: ignore[arg-type]
    flush.expect_all()
    return flush


@pytest.mark.parametrize("poisoned", [0, 1])
def test_flush_nan_in_any_bucket_restores_residual(poisoned: int) -> None:
    core, residual = core_of_one_rank(0.5)
    flush = flush_of(core)
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
        assert (residual == (0.5 if nan else 0.0)).all()


def test_flush_skipped_step_scales_residual_to_next_loss_scale() -> None:
    core, residual = core_of_one_rank(0.5)
    flush = flush_of(core)
    gradient = torch.ones(SECOND.nbytes // 4)
    flush.add(SECOND, gradient)
    flush.reduced(gradient.fill_(torch.inf))
    scaler = SimpleNamespace(get_scale=lambda: 512.0)  # halved, as it skips that step
    auto = SimpleNamespace(settle=flush.settle)
    driver = SimpleNamespace(settle=lambda: None)
    parts: dict[str, Any] = {"core": core, "driver": driver, "auto": auto, "_scaler": scaler, "_loss_scale": 1024.0}
    state: Any = SimpleNamespace(**parts, _guard=None, _before=None)
    ExchangeState.follow_loss_scale(state)
    assert (residual == 0.25).all()


class Slow:
    """A finite average, and another with NaN that another thread reports during the check of the first."""

    def __init__(self, flush: Flush) -> None:
        self.flush = flush

    is_cuda = False

    def sum(self) -> torch.Tensor:
        self.flush.reduced(torch.full((1,), torch.nan))
        return torch.ones(1)


def test_flush_concurrent_nan_is_detected() -> None:
    """Averages come in gloo's threads and in the backward pass's; the interpreter's lock is free during `sum`."""
    flush = flush_of(core_of_one_rank()[0])
    flush.reduced(Slow(flush))  # type: ignore[arg-type]
    assert flush.undone


def test_flush_finite_averages_with_overflowing_sum_are_applied() -> None:
    flush = Flush(core := core_of_one_rank()[0], Driver(core))  # type: ignore[arg-type]
    flush.reduced(torch.full((9,), 3e38))
    flush.reduced(torch.full((9,), 6e4, dtype=torch.float16))
    assert not flush.undone
    flush.reduced(torch.tensor([torch.inf, -torch.inf]))
    assert flush.undone
