"""Comparing messages with the link that is known."""

from __future__ import annotations

from tests.policies.autopilot.links import WORK, notes, train
from thinwire.policies.autopilot.levels import levels
from thinwire.policies.autopilot.pilot import Pilot


def test_compressed_steps_of_which_no_rank_says_what_it_sent_are_compared_with_what_is_expected() -> None:
    made = levels()
    pilot = Pilot(made, WORK)
    train(pilot, [1e7] * 300)
    place, known = pilot.memory.level, pilot.memory.link_bps
    assert made[place].codec is not None and 9e6 < known < 1.1e7
    for _ in range(8):
        said = [note._replace(sent_nbytes=0.0) for note in notes(made[place], 1e5)]
        pilot.take(said, place)
    assert pilot.memory.link_bps < known / 10, "late messages tell of a slower link"
