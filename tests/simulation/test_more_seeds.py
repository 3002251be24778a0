"""Seeds that hold: the second thousand."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import run

SEEDS = 250


@pytest.mark.parametrize("first", [1000, 1250, 1500, 1750])
def test_no_rule_is_broken(first: int) -> None:
    tally = run(first, first + SEEDS)
    assert not tally.failures, tally.said
