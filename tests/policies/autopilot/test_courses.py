"""The controller on links that change: its seconds to equal accuracy over the best fixed setting's, and what measuring
links takes."""

from __future__ import annotations

from tests.policies.autopilot.courses import TimedTraining, over_best, stepping

LENET = TimedTraining(430_000, 0.020, 0.004)
LENET5 = TimedTraining(60_000, 0.012, 0.002)
MLP = TimedTraining(101_000, 0.007, 0.0015)
STEPS = stepping(1e8, 1e7, 5e7, 5e6, every_s=20)
FLAPS = stepping(1e8, 5e6, every_s=1)


def test_where_the_link_changes_auto_takes_little_more_than_the_best_fixed_setting() -> None:
    for training, course, steps, most in (
        # 100 Mbit/s is found out about from the first uncompressed steps, of 0.2 s each: 0.9 s of 15.
        (LENET, STEPS, 500, 1.08),
        (LENET5, STEPS, 1500, 1.02),
        (MLP, STEPS, 1500, 1.04),
        (LENET, FLAPS, 500, 1.12),
        (LENET5, FLAPS, 1500, 1.07),
        (MLP, FLAPS, 1500, 1.07),
    ):
        probing_s = seconds = 0.0
        for seed in range(3):
            share, taken = over_best(training, course, steps, seed)
            assert share <= most, (training, seed, share, taken.probing_s, taken.changes)
            probing_s, seconds = probing_s + taken.probing_s, seconds + taken.seconds
        assert probing_s <= 0.05 * seconds


def test_a_link_that_is_a_thousandth_of_what_it_was_is_not_measured_by_messages_for_the_fast_one() -> None:
    """A message of 4 MB, as suits 20 Gbit/s, takes 3.4 s at 10 Mbit/s."""
    taken = LENET5.auto(lambda _: 1e7, 400, seed=0)
    assert taken.probing_s < 0.3 and taken.settings[10].startswith("3lc")


def test_without_a_limit_notes_and_measurements_take_a_hundredth_of_the_time_at_most() -> None:
    for training in (LENET, LENET5, MLP):
        share, taken = over_best(training, lambda _: 2e10, 1500, seed=0)
        assert set(taken.settings) == {"uncompressed"} and share <= 1.01


def test_a_link_that_slows_down_late_is_heard_of_between_two_notes() -> None:
    """Uncompressed, a step of the slow link takes 1.1 s with LeNet, and notes come every 12 to 25 steps by then."""
    for training, steps, most in ((LENET, 500, 1.30), (LENET5, 1500, 1.04), (MLP, 1500, 1.06)):
        for seed in range(2):
            share, taken = over_best(training, lambda now_s: 2e10 if now_s < 5 else 1e7, steps, seed)
            assert share <= most, (training, seed, share, taken.probing_s, taken.changes)
