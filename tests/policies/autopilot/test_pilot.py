"""The controller: its choice on each link, how soon, that it does not oscillate, and what it makes of nonsense."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from tests.policies.autopilot.links import WORK, notes, train
from thinwire.policies.autopilot.critical import GUARD
from thinwire.policies.autopilot.levels import levels
from thinwire.policies.autopilot.notes import StepNote
from thinwire.policies.autopilot.pilot import Pilot

LEVELS = levels()
NAMES = [level.name for level in LEVELS]


def changes(names: list[str]) -> list[tuple[int, str]]:
    """At which step which setting began."""
    return [(step, now) for step, (before, now) in enumerate(pairwise(names), 1) if now != before]


def test_each_link_gets_its_setting_and_a_step_of_the_link_is_answered_within_three_exchanges() -> None:
    pilot = Pilot(LEVELS, WORK)
    rates = [1e8] * 300 + [1e7] * 300 + [1e8] * 300 + [2e6] * 300
    names = train(pilot, rates)
    settled = [names[299], names[599], names[899], names[1199]]
    places = [NAMES.index(name) for name in settled]
    assert all(name.startswith("3lc") for name in settled), settled
    assert places[1] > places[0] and places[2] < places[1] and places[3] > places[2], settled
    for begin in (300, 600, 900):
        first = next(step for step, _ in changes(names) if step >= begin)
        assert first - begin <= 3, (begin, changes(names))
    assert len(changes(names)) <= 8, changes(names)


def test_without_a_limit_nothing_is_compressed_and_notes_are_rare() -> None:
    pilot = Pilot(LEVELS, WORK)
    assert set(train(pilot, [2e10] * 200)) == {"uncompressed"}
    assert pilot.note_every > 16
    names = train(pilot, [1e7] * 20)
    assert changes(names)[0][0] <= 3 and names[-1].startswith("3lc")


def test_a_link_that_flaps_every_second_ends_at_the_setting_of_the_slow_one() -> None:
    pilot = Pilot(LEVELS, WORK)
    names = train(pilot, ([2e10] * 70 + [1e7] * 70) * 20)
    found = changes(names)
    assert len(found) <= 10, found
    assert {name.startswith("3lc") for name in names[-700:]} == {True}, found


def test_the_first_steps_and_steps_after_a_jump_of_the_norm_stay_mild() -> None:
    pilot = Pilot(LEVELS, WORK)
    names = train(pilot, [2e6] * 100)
    assert {name.partition("[")[0] for name in names[: GUARD - 1]} == {"3lc"}
    assert all("s=1," in name or "s=1]" in name for name in names[: GUARD - 1]), names[:GUARD]
    assert pilot.setting.sparsity > 1
    jump = [note._replace(norm=4.5) for note in notes(pilot.setting, 2e6)]
    pilot.take(jump, pilot.memory.level)
    assert pilot.setting.sparsity == 1 and pilot.memory.guard == GUARD
    assert "steps are critical" in pilot.news()[-1]


def test_the_fewest_bytes_are_sent_whatever_the_link() -> None:
    pilot = Pilot(LEVELS, WORK, target="bytes")
    names = train(pilot, [2e10] * 60)
    assert names[0] == "3lc[s=1,zstd]" and names[-1] == NAMES[-1] and len(changes(names)) == 1
    with pytest.raises(tw.ConfigError, match="target='accuracy'"):
        Pilot(LEVELS, WORK, target="accuracy")  # type: ignore[arg-type]  # as a script may


def test_limits_of_the_lag_leave_the_settings_that_can_keep_them() -> None:
    assert [len(levels(limit)) for limit in (5, 2, 1.9, 0.25, 0.1)] == [9, 9, 3, 3, 2]
    assert all(level.codec is None or level.codec.residual_by_default for level in LEVELS)
    for limit in (0, -1, math.nan, math.inf, True, "5"):
        with pytest.raises(tw.ConfigError, match="lag_limit="):
            levels(limit)  # type: ignore[arg-type]  # as a script may
    names = train(Pilot(levels(1.0), WORK, lag_limit=1.0), [1e7] * 50)
    assert names[-1] == "int8"


def test_numbers_that_cannot_be_are_left_out_and_complained_of_once() -> None:
    pilot = Pilot(LEVELS, WORK)
    for bps in (0.0, math.inf, math.nan, -3.0, 1e300):
        pilot.take_link(bps)
    assert pilot.setting.codec is None and pilot.memory.link_bps == 0
    [said] = pilot.news()
    assert "a link of 0 bit/s" in said
    train(pilot, [1e7] * 60)
    pilot.news()
    before = pilot.setting.name
    for broken in (-5.0, 1e9, math.nan):
        jumped = notes(pilot.setting, 1e7)
        jumped[2] = jumped[2]._replace(step_s=broken)
        pilot.take(jumped, pilot.memory.level)
        pilot.take([note._replace(link_s=math.inf) for note in jumped], pilot.memory.level)
    assert pilot.setting.name == before
    [said] = pilot.news()
    assert "rank 2 measured step_s = -5" in said


def test_a_state_continues_with_the_same_decisions_and_a_foreign_one_is_refused() -> None:
    rates = [1e8] * 60 + [1e7] * 60
    pilot, resumed = Pilot(LEVELS, WORK), Pilot(LEVELS, WORK)
    train(pilot, rates)
    resumed.load_state(pilot.state())
    more = [5e7] * 80 + [2e10] * 80
    assert train(pilot, more) == train(resumed, more)
    assert pilot.state() == resumed.state()
    milder = Pilot(levels(1.0), WORK)
    milder.load_state(Pilot(LEVELS, WORK, target="bytes").state())
    assert milder.setting == levels(1.0)[-1], "the strongest that a smaller lag_limit leaves"
    for text in ("", "[]", '{"level": "x"}'):
        with pytest.raises(tw.ConfigError, match="the state of codec='auto' cannot be read"):
            pilot.load_state(text)


times = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 10)
any_note = st.builds(StepNote, times, times, times, times, times, times, times, times)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(any_note, min_size=3, max_size=3), times | st.floats(1e3, 1e12)), max_size=40),
    st.sampled_from([0.1, 1.0, 5.0]),
    st.sampled_from(["time", "bytes"]),
)
def test_any_measurements_give_one_decision_within_the_bounds(steps, limit, target) -> None:  # type: ignore[no-untyped-def]
    pilots = [Pilot(levels(limit), WORK, lag_limit=limit, target=target) for _ in range(2)]
    for told, bps in steps:
        for pilot in pilots:
            pilot.take(told, pilot.memory.level)
            if pilot.wants_probe:
                pilot.take_link(bps)
            guarded = pilot.memory.guard > 0
            assert pilot.setting in pilot.levels and not (guarded and pilot.setting.sparsity > 1)
            assert 1 <= pilot.note_every <= 8
        assert pilots[0].state() == pilots[1].state()
