"""The simulator itself: seeds repeat, planted bugs are found, and what was wrong once is right."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.simulation.__main__ import hunt
from tests.simulation.bugs import BUGS, OF_LEARNERS
from tests.simulation.cluster import play
from tests.simulation.ranks import Rank, play_ranks, ranks, run_ranks
from tests.simulation.regressions import REGRESSIONS
from tests.simulation.scenario import scenario
from thinwire.collective.residuals import Residuals


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in (1, 2, 3):
        assert play(scenario(seed), trace=True) == play(scenario(seed), trace=True)


def test_scenarios_that_broke_a_rule_once_hold() -> None:
    for name, each in REGRESSIONS.items():
        outcome = play(each)
        assert not outcome.rule, f"{name}: {outcome.text}"


def test_planted_bugs_are_found() -> None:
    for name, most in {"a push applied twice on resend": 40, "one update too stale": 20}.items():
        assert hunt(name, most)[1], name
    for name in OF_LEARNERS:
        assert hunt(name, 40)[1], name


@pytest.mark.long
def test_every_planted_bug_is_found() -> None:
    found = {name: hunt(name)[1] for name in BUGS}
    assert [name for name, rule in found.items() if not rule] == []


def test_seeds_of_ranks_hold_and_mistakes_in_the_collective_mode_are_found() -> None:
    assert run_ranks(0, 100) == []
    with mock.patch.object(Residuals, "restore", return_value=None):  # a step that is skipped leaves its marks
        assert play_ranks(ranks(1))[0] == "residual"

    def fail(rank: Rank, job: object, error: Exception, way: object) -> None:  # no other hears why it gives up
        rank.failure = rank.failure or error

    with mock.patch.object(Rank, "_fail", fail):
        assert play_ranks(ranks(8))[0] == "progress"
