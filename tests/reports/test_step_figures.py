"""Figures from step records: means of one rank and step, without the first steps, of the newest run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from thinwire.reports.step_figures import RecordedSteps
from thinwire.telemetry import StepRecord


def training(steps: int = 20, *, first: int = 0, begin: float = 100.0, ranks: int = 2) -> Iterator[StepRecord]:
    """Half a second a step, the first of which compiles; the bias travels as bfloat16 is."""
    for step in range(first, first + steps):
        time_s = begin + 0.5 * step + (9 if step else 0)
        for rank in range(ranks):
            first_step = step == 0
            yield StepRecord(
                step=step,
                table="fc.weight",
                numel=1000,
                rank=rank,
                codec="3lc",
                payload_bytes_push=100,
                payload_bytes_pull=0 if first_step else 60,
                encode_s=5.0 if first_step else 0.1,
                wait_s=0.05,
                residual_norm=1.0,
                residual_lag=step + rank,
                time_s=time_s,
            )
            yield StepRecord(
                step=step,
                table="fc.bias",
                numel=10,
                rank=rank,
                payload_bytes_push=20,
                payload_bytes_pull=20,
                itemsize=2,
            )
            yield StepRecord(step=step, table="", numel=0, rank=rank, time_s=time_s, loss=10.0 - step + 2 * rank)


def test_figures_leave_out_the_first_steps() -> None:
    figures = RecordedSteps(training()).figures()
    assert (figures.warm_up, figures.steps, figures.last_step, figures.ranks) == (5, 15, 19, 2)
    assert figures.step_s == pytest.approx(0.5) and figures.median_step_s == pytest.approx(0.5)
    assert (figures.push_nbytes, figures.pull_nbytes, figures.plain_nbytes) == (120, 80, 8040)
    assert figures.ratio == pytest.approx(40.2)
    assert (figures.encode_s, figures.decode_s, figures.wait_s) == pytest.approx((0.1, 0, 0.05))
    assert (figures.lag, figures.lag_table) == (20, "fc.weight")
    assert (figures.loss, figures.accuracy) == (-8.0, None)
    weight, bias = figures.tables
    assert (weight.table, weight.codec, weight.push_nbytes, weight.lag) == ("fc.weight", "3lc", 100, 20)
    assert (bias.ratio, bias.lag) == (1.0, None)
    assert RecordedSteps(training()).figures(leave_out=0).encode_s == pytest.approx((5 + 19 * 0.1) / 20)


def test_tables_of_ranks_that_are_not_at_one_step_add_up_to_the_whole() -> None:
    """Ranks append to one file as they come: a slow one's first steps stand behind another's later ones."""
    records = sorted(training(), key=lambda each: each.step + 7 * each.rank)
    figures = RecordedSteps(records).figures()
    assert sum(each.push_nbytes for each in figures.tables) == figures.push_nbytes == 120
    assert sum(each.pull_nbytes for each in figures.tables) == figures.pull_nbytes == 80


def local_updates(steps: int, *, h: int = 4) -> Iterator[StepRecord]:
    """Every h-th step is an exchange, answered in the next; the first two compile: 3 s to encode, 2 to decode."""
    time_s = 100.0
    for step in range(steps):
        pushes, pulls, compiles = step % h == h - 1, step % h == 0 and step > 0, step <= 2 * h
        encode_s, decode_s = pushes * (3.0 if compiles else 0.1), pulls * (2.0 if compiles else 0.1)
        time_s += 0.5 + encode_s + decode_s
        yield StepRecord(
            step=step,
            table="fc.weight",
            numel=1000,
            payload_bytes_push=100 * pushes,
            payload_bytes_pull=100 * pulls,
            encode_s=encode_s,
            decode_s=decode_s,
            time_s=time_s,
        )


def test_where_steps_come_between_exchanges_both_that_compile_are_left_out() -> None:
    figures = RecordedSteps(local_updates(29)).figures()
    assert (figures.warm_up, figures.steps) == (9, 20)
    assert figures.step_s == pytest.approx(0.55)
    assert (figures.encode_s, figures.decode_s) == pytest.approx((0.025, 0.025))


def test_the_ratio_is_over_all_steps_where_these_were_counted() -> None:
    def total(rank: int, step: int, taken: int, wire: float) -> StepRecord:
        plain = 100.0 * taken
        return StepRecord(step=step, table="", numel=0, rank=rank, taken=taken, wire_nbytes=wire, plain_nbytes=plain)

    recorded = RecordedSteps([*training(), total(0, 9, 10, 50.0), total(0, 19, 20, 100.0), total(1, 19, 20, 300.0)])
    assert (recorded.figures().taken, recorded.figures().ratio) == (20, 10.0)
    recorded.keep(2)
    assert (recorded.figures().taken, recorded.figures().ratio) == (20, 10.0), "however few steps are shown"
    resumed = RecordedSteps([*training(), total(0, 9, 10, 50.0), total(0, 11, 2, 50.0), total(0, 13, 4, 150.0)])
    assert (resumed.figures().taken, resumed.figures().ratio) == (14, 7.0), "a process that began again counts anew"


def test_records_without_times_or_of_one_step_or_none() -> None:
    nothing = RecordedSteps().figures()
    assert (nothing.steps, nothing.last_step, nothing.step_s, nothing.ratio, nothing.tables) == (0, -1, None, 0, ())
    one = RecordedSteps(training(1)).figures()
    assert (one.steps, one.warm_up, one.step_s, one.push_nbytes) == (1, 0, None, 120)
    old = [StepRecord(step=step, table="fc", numel=8, payload_bytes_push=4) for step in range(9)]
    assert RecordedSteps(old).figures().step_s is None and RecordedSteps(old).step_seconds() == {}
    assert RecordedSteps([StepRecord(step=0, table="", numel=0, loss=1.0)]).figures().last_step == -1


def test_steps_that_are_taken_again_replace_those_of_before() -> None:
    again = RecordedSteps([*training(20), *training(8, first=12, begin=500)])
    assert again.runs == 1 and again.figures().push_nbytes == 120 and again.figures().last_step == 19
    assert max(again.step_seconds()[step] for step in range(13, 20)) == pytest.approx(0.5)
    assert again.step_seconds()[12] > 300, "the way back is time that the run took"
    other = RecordedSteps([*training(20), *training(10, begin=900, ranks=1)])
    assert (other.runs, other.figures().last_step, other.figures().ranks) == (2, 9, 1)


def test_steps_that_hold_scores_alone_are_not_counted_and_the_latest_scores_stay() -> None:
    recorded = RecordedSteps()
    for step in range(1000):
        if step % 100 == 0:
            recorded.add(StepRecord(step=step, table="fc", numel=8, payload_bytes_push=4))
        recorded.add(StepRecord(step=step, table="", numel=0, loss=float(step), accuracy=0.5 if step == 100 else None))
        recorded.keep(3)
    assert recorded.steps == [700, 800, 900]
    figures = recorded.figures(leave_out=0)
    assert (figures.last_step, figures.loss, figures.accuracy, figures.lost_at) == (900, 999.0, 0.5, None)


def test_figures_tell_a_loss_that_is_not_finite_from_a_missing_one() -> None:
    recorded = RecordedSteps()
    for step, loss in enumerate([2.5, math.nan, 2.25, None, math.inf, math.nan, None]):
        recorded.add(StepRecord(step=step, table="fc", numel=8, payload_bytes_push=4))
        recorded.add(StepRecord.of_scores(step, 0, 100.0 + step, loss, None))
    assert (recorded.figures().loss, recorded.figures().lost_at) == (2.25, 4)
    recorded.add(StepRecord(step=9, table="fc", numel=8, payload_bytes_push=4))
    recorded.keep(1)
    assert (recorded.figures().loss, recorded.figures().lost_at) == (2.25, 4), "however long ago it was lost"
    recorded.add(StepRecord.of_scores(9, 0, 107.0, 2.0, None))
    assert (recorded.figures().loss, recorded.figures().lost_at) == (2.0, None)


def test_recorded_steps_have_scores_and_lags_over_time() -> None:
    recorded = RecordedSteps(training(3000, ranks=1))
    assert recorded.scores("loss")[:2] == [(0, 0.0, 10.0), (1, 9.5, 9.0)] and recorded.scores("accuracy") == []
    curves = recorded.lag_curves()
    assert [step for step, _ in curves["fc.weight"]] == list(range(3000)) and set(curves) == {"fc.weight"}


def of_table(step: int, nbytes: int, codec: str, rank: int = 0) -> StepRecord:
    return StepRecord(step=step, table="fc", numel=1000, rank=rank, codec=codec, payload_bytes_push=nbytes)


def test_tables_have_the_means_of_their_newest_codec_without_the_first_steps() -> None:
    fixed = [of_table(step, 4000 if step < 5 else 100, "3lc", rank) for step in range(20) for rank in range(2)]
    recorded = RecordedSteps(fixed)
    [figures] = recorded.figures().tables
    assert (figures.push_nbytes, figures.ratio) == (100, 80)
    changed = [of_table(step, 4000, "") if step < 12 else of_table(step, 100, "3lc") for step in range(20)]
    [figures] = RecordedSteps(changed).figures().tables
    assert (figures.codec, figures.push_nbytes) == ("3lc", 100)
    growing = RecordedSteps(of_table(step, step, "3lc") for step in range(20))
    growing.keep(4)
    assert growing.figures(leave_out=0).tables[0].push_nbytes == (16 + 17 + 18 + 19) / 4
    long = RecordedSteps(of_table(step, 100 if step < 9000 else 50, "3lc") for step in range(10_000))
    assert long.figures(leave_out=9000).tables[0].push_nbytes == 50
