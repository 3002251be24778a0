"""The simulator itself: seeds repeat, planted bugs are found, and what was wrong once is right."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import hunt
from tests.simulation.bugs import BUGS
from tests.simulation.cluster import play
from tests.simulation.regressions import REGRESSIONS
from tests.simulation.scenario import scenario


def test_a_seed_is_one_run() -> None:
    for seed in (1, 2, 3):
        assert play(scenario(seed), trace=True) == play(scenario(seed), trace=True)


def test_what_was_wrong_once_is_right() -> None:
    for name, each in REGRESSIONS.items():
        outcome = play(each)
        assert not outcome.rule, f"{name}: {outcome.text}"


def test_planted_bugs_are_found() -> None:
    for name, most in {"a push applied twice on resend": 40, "one update too stale": 20}.items():
        assert hunt(name, most)[1], name


@pytest.mark.long
def test_every_planted_bug_is_found() -> None:
    found = {name: hunt(name)[1] for name in BUGS}
    assert [name for name, rule in found.items() if not rule] == []
