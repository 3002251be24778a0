"""When the gradient that accumulated is worth sending."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from thinwire.errors import ConfigError
from thinwire.policies.criteria import CRITERIA, Pending, criterion


def pending(*, gradient: float = 1.0, weights: float = 1.0, iterations: int = 1, seconds: float = 0.0) -> Pending:
    """`iterations` equal gradients of this size, four values each."""
    one = np.full(4, gradient, np.float32)
    squares = iterations * float(one @ one)
    return Pending(one * iterations, np.full(4, weights, np.float32), iterations, squares, seconds)


def test_norm_compares_the_update_with_the_weights() -> None:
    for gradient, sends in ((0.09, False), (0.1, True), (0.5, True), (0.0, False)):
        assert criterion("norm", 0.0999999).send(pending(gradient=gradient)) is sends, gradient
    # A fresh bias: any gradient is significant beside nothing.
    assert criterion("norm", 0.5).send(pending(gradient=1e-6, weights=0.0))


def test_variance_sends_gradients_that_agree_and_not_those_that_cancel() -> None:
    wanted = criterion("variance", 2.0)
    assert not wanted.send(pending(iterations=1))
    assert wanted.send(pending(iterations=2)) and wanted.send(pending(iterations=9))
    gradients = np.random.default_rng(0).standard_normal((50, 1000)).astype(np.float32)
    total = gradients.sum(0)
    cancelling = Pending(total, total, 50, float((gradients**2).sum()), 0.0)
    assert not wanted.send(cancelling), "‖Σg‖² is about Σ‖g‖²"
    assert criterion("variance", 0.5).send(cancelling)


def test_period_counts_iterations_and_time_seconds() -> None:
    assert [criterion("period", 3).send(pending(iterations=n)) for n in (1, 2, 3, 4)] == [False, False, True, True]
    seconds = (0.0, 0.49, 0.5, 2.0)
    assert [criterion("time", 0.5).send(pending(seconds=s)) for s in seconds] == [False, False, True, True]
    assert all(criterion(name, 0).send(pending()) for name in CRITERIA), "a threshold of 0 always sends"


def test_what_is_no_criterion() -> None:
    refused: list[tuple[str, Any, str]] = [
        *(("mood", 1.0, "'mood'"), ("norm", -0.1, "threshold=-0.1"), ("time", "soon", "threshold='soon'")),
    ]
    for name, threshold, named in refused:
        with pytest.raises(ConfigError, match=named):
            criterion(name, threshold)
