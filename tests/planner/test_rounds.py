"""How many steps between exchanges are enough for these to take a given share of the time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.errors import ConfigError
from thinwire.planner.rounds import Round, check_share


@pytest.mark.parametrize("exchange_s", [0.001, 7.77])
@pytest.mark.parametrize("share", [0.01, 0.25])
def test_as_many_steps_as_are_enough_and_not_one_more(exchange_s: float, share: float) -> None:
    made = Round(steps=4, alone_s=0.3, exchanged_s=0.3 + exchange_s)
    enough = made.steps_for(share)
    assert enough is not None and replace(made, steps=enough).exchange_share <= share * (1 + 1e-9)
    assert enough == 1 or replace(made, steps=enough - 1).exchange_share > share
    assert replace(made, steps=7).steps_for(share) == enough, "the h that it has now is nothing to the answer"


def test_an_exchange_that_costs_nothing_and_steps_that_take_no_time() -> None:
    hidden = Round(steps=4, alone_s=0.3, exchanged_s=0.3)
    assert (hidden.exchange_share, hidden.steps_for(0.25)) == (0.0, 1) and hidden.step_s == pytest.approx(0.3)
    assert replace(hidden, exchanged_s=0.29).exchange_share == 0.0, "rounding of sums is no gain"
    assert replace(hidden, alone_s=0.0).steps_for(0.25) is None


@pytest.mark.parametrize("share", [0.0, float("nan")])
def test_a_share_that_no_exchange_can_be_held_to_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="a share of the time above 0 and below 1"):
        check_share(share)
