"""A bound on the lag: its choice of s, its limit, its saved state, and equal results on host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire.codecs import Context
from thinwire.codecs.lag import MEASURE_EVERY, DeltaLagBound, LagBound, follow_tensors

LIMIT = 5.0


def bounded(sparsity: float = 1.75, lag: float | None = LIMIT, size: int = 300, dtype: Any = np.float32) -> Context:
    return tw.codec("3lc", sparsity=sparsity, lag=lag).context(np.zeros(size, dtype))


def lag_bound(context: Context) -> LagBound:
    assert context.lag_bound is not None
    return context.lag_bound


def measure(bound: LagBound, steps_waiting: float) -> tuple[float, float]:
    """Encodes up to the next measurement with an update of ones; returns the lag and s."""
    update = np.ones(5, np.float32)
    for _ in range(MEASURE_EVERY):
        bound.follow(update, np.full(5, steps_waiting, np.float32))
    return round(bound.lag, 6), round(bound.sparsity, 6)


def test_lag_bound_starts_at_1_rises_by_eighths_and_falls_at_once() -> None:
    bound = LagBound(LIMIT, 1.75)
    assert bound.sparsity == 1
    rising = [measure(bound, 1.0)[1] for _ in range(10)]
    assert rising == [round(min(1.75, 1 + 0.75 * k / 8), 6) for k in range(1, 11)]
    assert measure(bound, 4.5) == (4.5, 1.75), "between four fifths of the limit and the limit it stays"
    assert measure(bound, 5.5)[1] == 1
    assert measure(bound, 4.5)[1] == 1
    assert measure(bound, 3.9)[1] > 1


@given(
    kind=st.sampled_from(["walk", "constant", "turning"]),
    seed=st.integers(0, 2**32 - 1),
    tail=st.integers(1, 3),
    size=st.sampled_from([40, 300, 6000]),
)
@settings(max_examples=18, deadline=None)
def test_lag_stays_within_the_limit_or_the_lag_of_s_1(kind: str, seed: int, tail: int, size: int) -> None:
    """Between two measurements it can grow by what comes in them, and not by more."""
    draw = np.random.default_rng(seed)
    base = (draw.standard_normal(size) ** tail).astype(np.float32)
    contexts = {"bounded": bounded(size=size), "s=1": bounded(1.0, size=size), "free": bounded(lag=1e9, size=size)}
    lags: dict[str, list[float]] = {name: [] for name in contexts}
    for step in range(160):
        noise = (draw.standard_normal(size) ** tail).astype(np.float32)
        update = {"walk": noise, "constant": base, "turning": noise + np.float32(np.sin(step / 20)) * base}[kind]
        for name, context in contexts.items():
            context.encode(update)
            if step % MEASURE_EVERY == MEASURE_EVERY - 1:
                lags[name].append(lag_bound(context).lag)
                assert name != "bounded" or lags[name][-1] <= LIMIT or lag_bound(context).sparsity == 1
    assert max(lags["bounded"]) <= max(LIMIT, *lags["s=1"]) + MEASURE_EVERY
    if max(lags["free"]) > 3 * max(LIMIT, *lags["s=1"]):
        assert np.mean(lags["bounded"]) < 0.7 * np.mean(lags["free"])


def test_lag_is_not_measured_without_residual_or_limit() -> None:
    assert bounded(lag=None).lag_bound is None
    assert tw.codec("3lc", lag=3, error_feedback=False).context(torch.zeros(9)).lag_bound is None
    for wrong in (0.5, 0, -1, float("inf"), float("nan"), "five", True):
        with pytest.raises(tw.ConfigError, match="lag="):
            tw.codec("3lc", lag=wrong)


def test_lag_bound_below_its_limit_reaches_the_largest_sparsity() -> None:
    free, fixed = bounded(1.5, lag=1e9), bounded(1.5, lag=None)
    draw = np.random.default_rng(1)
    for _ in range(40):
        free.encode(draw.standard_normal(300).astype(np.float32))
    assert lag_bound(free).sparsity == 1.5
    assert free.residual is not None and fixed.residual is not None
    fixed.residual.copy_(free.residual)
    last = draw.standard_normal(300).astype(np.float32)
    assert free.encode(last) == fixed.encode(last)


def test_lag_of_device_tensors_equals_that_of_arrays() -> None:
    ours, theirs = ([bounded(size=size) for size in (1, 300, 50_000)] for _ in range(2))
    draw = np.random.default_rng(3)
    for _ in range(9):
        updates = [draw.standard_normal(context.size).astype(np.float32) for context in ours]
        for context, other, update in zip(ours, theirs, updates, strict=True):
            context.encode(update)
            assert other.residual is not None and context.residual is not None
            other.residual.copy_(context.residual)
        follow_tensors([(c.lag_bound, torch.from_numpy(u), c.residual) for c, u in zip(theirs, updates, strict=True)])
    for context, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(lag_bound(context).changing(), lag_bound(other).changing())


def test_lag_is_independent_of_the_loss_scale() -> None:
    bound = LagBound(LIMIT, 1.75)
    measure(bound, 4.5)
    bound.scale(1024.0)
    update = np.full(5, 1024, np.float32)
    for _ in range(MEASURE_EVERY):
        bound.follow(update, 4.5 * update)
    assert bound.lag == pytest.approx(4.5)


def test_lag_state_round_trips_and_damaged_state_is_refused() -> None:
    bound = DeltaLagBound(LIMIT, 1.75)
    draw = np.random.default_rng(4)
    model, copy = np.zeros(30, np.float32), np.zeros(30, np.float32)

    def train(*bounds: DeltaLagBound, steps: int) -> None:
        for _ in range(steps):
            model[:] += draw.standard_normal(30).astype(np.float32)
            copy[:] += 0.3 * (model - copy)
            for each in bounds:
                each.follow_model(model, copy)

    train(bound, steps=7)  # between two measurements, with the model before the next one remembered
    other, parted = DeltaLagBound(LIMIT, 1.75), bound.clone()
    other.load_state_dict(bound.state_dict())
    train(bound, other, parted, steps=9)
    assert bound.changing().tolist() == other.changing().tolist() == parted.changing().tolist()
    assert 1 < bound.lag < 4, "a third of what is lacking is sent at every step"
    kept = bound.state_dict()
    wrongs: list[Any] = [torch.zeros(3), torch.full((4,), -1.0), torch.full((4,), torch.nan), "x", {}]
    damaged: list[Any] = [kept | {"changing": wrong} for wrong in wrongs]
    for state in (*damaged, {}, 5, kept | {"before": "x"}, kept | {"before": torch.zeros(30, device="meta")}):
        with pytest.raises(tw.ConfigError, match="state of a lag"):
            bound.load_state_dict(state)
    assert all(torch.equal(kept[name], now) for name, now in bound.state_dict().items())
