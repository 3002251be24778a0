"""Seeds that hold: the second half of a thousand; and deaths close together."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import run
from tests.simulation.deaths import deaths
from tests.simulation.scenario import learners

SEEDS, DEATHS = 250, 80


@pytest.mark.long
@pytest.mark.parametrize("first", [500, 750])
def test_no_rule_is_broken(first: int) -> None:
    tally = run(first, first + SEEDS)
    assert not tally.failures, tally.said


def test_no_training_ends_where_workers_and_servers_die_close_together() -> None:
    tally = run(0, DEATHS, deaths)
    assert not tally.failures, tally.said
    assert tally.ended["trained"] > 0.9 * DEATHS


@pytest.mark.long
def test_no_training_ends_by_many_deaths() -> None:
    tally = run(DEATHS, 5000, deaths)
    assert not tally.failures, tally.said


@pytest.mark.long
def test_learners_break_no_rule_in_many_seeds() -> None:
    tally = run(100, 5000, learners)
    assert not tally.failures, tally.said
