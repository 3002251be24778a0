"""The controller: its choice on each link, how soon, that it does not oscillate, and what it makes of nonsense."""

from __future__ import annotations

import math
from itertools import pairwise, product
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from tests.policies.autopilot.links import WORK, BusyTraining, notes, train
from thinwire.policies.autopilot.critical import GUARD
from thinwire.policies.autopilot.estimates import ENOUGH
from thinwire.policies.autopilot.levels import LAG_LIMIT, levels
from thinwire.policies.autopilot.notes import StepNote
from thinwire.policies.autopilot.pilot import Pilot
from thinwire.policies.autopilot.probing import MOST
from thinwire.policies.autopilot.rhythm import PATIENCE

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


def test_a_larger_multiplier_has_to_save_more_time_than_it_takes_more_steps() -> None:
    """At 35 Mbit/s a step with s = 1.5 is 5 % shorter, and a training takes 8 % more of them."""
    pilot, bps = Pilot(LEVELS, WORK), 3.5e7
    settled = train(pilot, [bps] * 300)[-1]
    seconds = {level.name: notes(level, bps)[-1].step_s for level in LEVELS}
    assert settled == "3lc[s=1,zstd]"
    assert seconds[settled] > 1.05 * seconds["3lc[s=1.5,zstd]"]
    assert train(Pilot(LEVELS, WORK), [1e7] * 300)[-1] == "3lc[s=1.5,zstd]"


def test_without_a_limit_nothing_is_compressed_and_notes_are_rare() -> None:
    pilot = Pilot(LEVELS, WORK)
    assert set(train(pilot, [2e10] * 200)) == {"uncompressed"}
    assert pilot.note_every == 22  # a quarter of a second of steps of 11 ms
    names = train(pilot, [1e7] * 20)
    assert changes(names)[0][0] <= 3 and names[-1].startswith("3lc")


def test_a_busy_machine_does_not_make_a_slower_link_unheard() -> None:
    """Exchanges that stumble have the link measured, and in vain; so it is measured less often, but for real news."""
    for bps in (1e8, 1e7):
        pilot = Pilot(LEVELS, WORK)
        chance = Random(1)
        for _ in range(400):
            told = notes(pilot.setting, 2e10, late_s=0.03 * (chance.random() < 0.3))
            pilot.take(told, pilot.memory.level)
            if pilot.wants_probe:
                pilot.take_link(2e10)
        assert pilot.memory.alarm_gap > 100
        names = train(pilot, [bps] * 12)
        assert names[3].startswith("3lc"), (bps, names)


def test_on_a_busy_machine_steps_settle_within_a_twentieth_of_the_best() -> None:
    """What was never measured is no better than what was; late messages are neither a slow link nor hide one."""
    trainings = (BusyTraining(101_000, 0.008, 0.002, 0.0008), BusyTraining(60_000, 0.014, 0.0015, 0.0005))
    for training, bps in product(trainings, (1e8, 5e7, 1e7)):
        trained = [training.over_best([2e10] * 70 + [bps] * 300, counted=200, seed=seed) for seed in range(3)]
        over, probes, pilots = zip(*trained, strict=True)
        assert fmean(over) <= 1.05 and max(over) <= 1.1, (training, bps)
        assert max(pilot.memory.changes for pilot in pilots) <= 8, (training, bps)
        assert max(probes) <= 8, "to measure the link takes as long as ten steps"


def test_a_step_that_was_hardly_late_does_not_hide_that_the_link_is_another_one() -> None:
    """Its messages tell of a fast link, as the best of those in doubt; and credit is short."""
    pilot = Pilot(LEVELS, WORK)
    train(pilot, [2e10] * 60)
    pilot.memory.credit = 2.0
    for _ in range(2):
        pilot.take(notes(pilot.setting, 2e10, late_s=0.008), pilot.memory.level)
    assert pilot.memory.doubts == 2 and pilot.memory.doubted_bps > 1e9
    assert changes(train(pilot, [1e7] * 8))


def test_messages_that_are_late_are_not_taken_for_a_slow_link_again_and_again() -> None:
    training = BusyTraining(101_000, 0.008, 0.002, 0.0008)
    over, probes, pilot = training.over_best([2e10] * 600, counted=500, seed=0)
    assert pilot.setting.codec is None and over <= 1.01 and probes <= 8


def test_what_exchanges_were_late_by_on_a_slow_link_is_not_expected_of_another() -> None:
    """A congested link is late by 0.16 s at every exchange, and becomes fast, without delays."""
    pilot = Pilot(LEVELS, WORK)
    for bps, late_s in ((1e6, 0.16), (1e8, 0.0)):
        for _ in range(150):
            pilot.take(notes(pilot.setting, bps, late_s=late_s), pilot.memory.level)
            if pilot.wants_probe:
                pilot.take_link(bps)
    assert pilot.setting.name.startswith("3lc") and pilot.step_s(pilot.memory.level) < 0.03


def test_what_rings_of_busy_processors_wait_does_not_keep_it_from_compressing() -> None:
    """Before a compressed step it is unknown whether that would wait as long."""
    training = BusyTraining(101_000, 0.008, 0.002, 0.0008, ring_s=0.006)
    for bps in (2e10, 3e9, 1e9):
        trained = [training.over_best([2e10] * 70 + [bps] * 600, counted=500, seed=seed) for seed in range(6)]
        over, _, pilots = zip(*trained, strict=True)
        assert fmean(over) <= 1.06 and max(over) <= 1.13, bps
        assert max(pilot.memory.changes for pilot in pilots) <= 8, bps


def test_changes_that_were_taken_back_do_not_keep_it_from_a_setting_that_saves_much() -> None:
    """Uncompressed steps begin to wait for more than the link explains, so that nothing but patience is in the way."""
    pilot = Pilot(LEVELS, WORK)
    train(pilot, [2e10] * 60)
    memory, taken = pilot.memory, 0
    memory.regrets, memory.moved, memory.resting, memory.rest = len(PATIENCE) - 2, False, 1, 1
    while pilot.setting.codec is None and taken < PATIENCE[memory.regrets]:
        told = notes(pilot.setting, 2e10)
        memory.note_gap = 1
        pilot.take([n._replace(step_s=n.step_s + 0.03, exposed_s=n.exposed_s + 0.03) for n in told], memory.level)
        taken += 1
    assert ENOUGH < taken < PATIENCE[memory.regrets] / 4


def test_where_compressed_steps_are_longer_it_finds_out_and_comes_back() -> None:
    for seed in range(3):
        over, _, pilot = BusyTraining(101_000, 0.008, 0.004, 0.0008).over_best([2e10] * 900, counted=700, seed=seed)
        assert over <= 1.03 and pilot.memory.changes <= 6


def test_ranks_that_are_late_themselves_do_not_make_a_link_look_faster() -> None:
    """What comes while a rank is late needs no waiting for."""
    pilot = Pilot(LEVELS, WORK)
    train(pilot, [5e6] * 60)
    told = notes(pilot.setting, 5e6)
    for step in range(8):
        late = [note._replace(link_s=0.0001) if rank == step % 4 else note for rank, note in enumerate(told)]
        pilot.take(late, pilot.memory.level)
        assert not pilot.wants_probe


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


def test_a_lag_near_its_limit_keeps_the_multiplier_where_it_is() -> None:
    pilot = Pilot(LEVELS, WORK)
    train(pilot, [2e7] * 100)
    place = pilot.memory.level
    assert pilot.setting.sparsity > 1
    for _ in range(20):
        pilot.take(notes(pilot.setting, 2e6, lag=0.9 * LAG_LIMIT), pilot.memory.level)
        if pilot.wants_probe:
            pilot.take_link(2e6)
    assert pilot.memory.link_bps == 2e6 and pilot.memory.level <= place


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


def test_all_reduces_that_the_host_does_not_see_leave_the_link_to_its_own_measurements() -> None:
    pilot = Pilot(LEVELS, WORK)
    pilot.take_link(2e10)
    steps = 0
    while not pilot.wants_probe:
        steps += 1
        unseen = [note._replace(link_s=0.0, exposed_s=0.0) for note in notes(LEVELS[0], 1e7)]
        pilot.take(unseen, 0)
    pilot.take_link(1e7)
    assert steps < 100 and pilot.setting.name.startswith("3lc")
    assert pilot.memory.compute_s == []


def test_unseen_all_reduces_that_become_slow_have_the_link_measured_soon_and_seldom_where_it_is_the_same() -> None:
    pilot, seconds, steps, probes = Pilot(LEVELS, WORK), 0.0, 0, list[int]()

    def train(step_s: float, count: int) -> None:
        """Steps of a GPU, whose notes tell how long they take and no more."""
        nonlocal seconds, steps
        for _ in range(count):
            seconds, steps = seconds + step_s, steps + 1
            if pilot.wants_probe:
                probes.append(steps)
                pilot.take_link(1e11)
            if steps % pilot.note_every == 0:
                pilot.take([StepNote(step_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.nan)] * 4, 0)

    train(0.02, 20_000)
    assert 15 <= len(probes) <= 25, "half a percent of the time, a tenth of a second each"
    known, begun = len(probes), seconds
    while not pilot.wants_probe:
        train(1.2, 1)
    assert seconds - begun < 20
    train(1.2, 5)
    assert pilot.setting.codec is None, "it is something else than the link"
    train(1.2, 500)
    assert len(probes) - known < 12
    pilot.memory.probe = True
    pilot.take_link(1e7)
    assert pilot.setting.name.startswith("3lc")


def test_a_first_backward_pass_that_compiles_hides_no_later_exchange_and_rounds_may_take_hours() -> None:
    pilot, slow = Pilot(LEVELS, WORK), [note._replace(step_s=60.0, overlap_s=59.0) for note in notes(LEVELS[0], 1e7)]
    pilot.take_link(1e7)
    pilot.take(slow, pilot.memory.level)
    assert all(name.startswith("3lc") for name in train(pilot, [1e7] * 30))
    assert pilot.memory.regrets == 0
    pilot = Pilot(LEVELS, WORK)
    pilot.take_link(1e7)
    for _ in range(GUARD):
        pilot.take([note._replace(step_s=5 * 3600.0) for note in notes(pilot.setting, 1e7)], pilot.memory.level)
    assert not pilot.memory.guard and pilot.memory.compute_s
    for _ in range(2):
        pilot.take_link(5e-324)
    assert pilot.memory.probe_in == MOST, "a link of next to nothing is measured as seldom as any"


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


def test_it_says_what_is_in_use_since_when() -> None:
    pilot = Pilot(LEVELS, WORK)
    assert pilot.describe(0, 7, "step") == "uncompressed since step 7, 0 changes, link not measured yet"
    pilot.memory.link_bps, pilot.memory.changes = 1e7, 1
    assert pilot.describe(2, 9, "exchange") == "int8 since exchange 9, 1 change, link 10 Mbit/s"


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


def test_every_note_of_uncompressed_steps_that_changes_nothing_halves_how_often_they_come() -> None:
    pilot = Pilot(levels(), WORK)
    pilot.take_link(1e10)
    gaps = []
    for _ in range(GUARD + 6):
        pilot.take(notes(pilot.setting, 1e10), pilot.memory.level)
        gaps.append(pilot.note_every)
    assert pilot.setting.codec is None and set(gaps[: GUARD - 1]) == {1}
    assert gaps[-6:] == [4, 8, 16, gaps[-1], gaps[-1], gaps[-1]] and gaps[-1] > 16
    pilot.take(notes(pilot.setting, 1e10, late_s=0.02), pilot.memory.level)
    assert pilot.memory.doubts and pilot.note_every == 1
    pilot.take(notes(pilot.setting, 1e10), pilot.memory.level)
    assert pilot.note_every >= 16, "a doubt that the next step settles costs one note"


def test_steps_that_a_rank_found_ordinary_count_and_doubts_do_not_have_everything_decided_anew() -> None:
    pilot = Pilot(levels(), WORK)
    pilot.take_link(2e7)
    while pilot.memory.notes < 200 or pilot.memory.rest <= ENOUGH + 2:
        pilot.take(notes(pilot.setting, 2e7), pilot.memory.level)
    memory, decided, decide = pilot.memory, [], pilot._decide
    pilot._decide = lambda: (decided.append(memory.notes), decide())[0]  # type: ignore[func-returns-value, method-assign]
    link_s = notes(pilot.setting, 2e7)[-1].link_s
    assert pilot.ordinary(link_s, math.nan)
    assert not pilot.ordinary(10 * link_s + 0.01, math.nan) and not pilot.ordinary(link_s, memory.norm + 3)
    before, rest, since = memory.notes, memory.rest, memory.since
    pilot.pass_by(memory.level, asked=False)
    assert (memory.notes, memory.rest, memory.since) == (before + 1, rest - 1, since + 1)
    pilot.pass_by(memory.level, asked=True)
    assert not pilot.ordinary(link_s, math.nan), "the others ask for it"
    pilot.take(notes(pilot.setting, 2e7, late_s=0.02), memory.level)
    assert memory.doubts and not memory.asked and not decided


def test_compressed_steps_of_which_no_rank_says_what_it_sent_are_compared_with_what_is_expected() -> None:
    pilot = Pilot(LEVELS, WORK)
    train(pilot, [1e7] * 300)
    place, known = pilot.memory.level, pilot.memory.link_bps
    assert LEVELS[place].codec is not None and 9e6 < known < 1.1e7
    for _ in range(8):
        said = [note._replace(sent_nbytes=0.0) for note in notes(LEVELS[place], 1e5)]
        pilot.take(said, place)
    assert pilot.memory.link_bps < known / 10, "late messages tell of a slower link"
