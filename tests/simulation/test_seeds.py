"""Seeds that hold: a tenth of a thousand. The rest is of the long tests, here and in `test_more_seeds.py`."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import run
from tests.simulation.scenario import learners

SEEDS = 100


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in (100, 200, 300, 400))])
def test_no_rule_is_broken(first: int) -> None:
    tally = run(first, first + SEEDS)
    assert not tally.failures, tally.said
    assert tally.ended["trained"] > 0.9 * SEEDS


def test_learners_break_no_rule() -> None:
    tally = run(0, SEEDS, learners)
    assert not tally.failures, tally.said
    assert tally.ended["trained"] > 0.8 * SEEDS


@pytest.mark.long
def test_no_rule_is_broken_by_many_seeds() -> None:
    tally = run(1000, 10_000)
    assert not tally.failures, tally.said
