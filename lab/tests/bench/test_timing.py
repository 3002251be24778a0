"""Timing side by side: numbers of calls, and the loop of the machine's limit."""

from __future__ import annotations

import numpy as np

from thinwire_lab.bench import timing
from thinwire_lab.bench.timing import Candidate, side_by_side


def test_timing_alternates_candidates() -> None:
    calls: list[str] = []
    candidates = [
        Candidate("a", lambda turn: calls.append(f"a{turn}"), lambda turn: calls.append("prepare")),
        Candidate("b", lambda turn: lambda: calls.append("finish"), turns=1),
    ]
    seconds = side_by_side(candidates, turns=2, calls=2)
    assert list(seconds) == ["a", "b"] and min(seconds.values()) >= 0
    assert calls == [*("prepare", "a-1", "a-1", "finish"), *("prepare", "a0", "a0", "finish"), *("prepare", "a1", "a1")]


def test_two_pass_floor_adds_and_scales() -> None:
    values = np.arange(1000, dtype=np.float32)
    residual = np.full(1000, 2.0, dtype=np.float32)
    timing.two_pass_floor(values, residual)
    assert np.array_equal(residual, (values + 2) / 2)
