"""The collective mode's seeds that hold, and mistakes in it that are found."""

from __future__ import annotations

from unittest import mock

from tests.simulation.ranks import Rank, play_ranks, ranks, run_ranks
from thinwire.collective.residuals import Residuals


def test_no_rule_is_broken() -> None:
    assert run_ranks(0, 100) == []


def test_mistakes_are_found() -> None:
    with mock.patch.object(Residuals, "restore", return_value=None):  # a step that is skipped leaves its marks
        assert play_ranks(ranks(1))[0] == "residual"

    def fail(rank: Rank, job: object, error: Exception, way: object) -> None:  # nobody hears why it gives up
        rank.failure = rank.failure or error

    with mock.patch.object(Rank, "_fail", fail):
        assert play_ranks(ranks(8))[0] == "progress"
