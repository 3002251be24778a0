"""Learners in step records: speeds, goodput, and the spans in which each computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.presentation.charts import draw
from thinwire.reports.learners import Learners
from thinwire.telemetry import StepRecord


def merged(time_s: float, version: int, *learners: tuple[int, int, float]) -> StepRecord:
    return StepRecord(step=version, table="", numel=0, time_s=time_s, version=version, learners=learners)


def storm() -> Learners:
    """Learner 1 stops after 40 s, is back at 60 s with a new process, and contributes again at 70 s."""
    learners = Learners()
    for number in range(1, 11):
        others = []
        if number <= 4:
            others = [(1, 10 * number, 0.5)]
        elif number >= 7:
            others = [(1, 10 * (number - 6), 0.5)]
        learners.add(merged(10.0 * number, number, (0, 10 * number, 0.5), *others))
    return learners


def test_spans_end_where_a_learner_stopped_and_begin_where_it_came_back() -> None:
    assert [tuple(span) for span in storm().spans(0)] == [(0.0, 100.0)]
    assert [tuple(span) for span in storm().spans(1)] == [(0.0, 40.0), (60.0, 100.0)]


def test_goodput_counts_the_time_that_a_learner_was_away() -> None:
    assert storm().goodput() == pytest.approx((90 + 30 + 40) / 90 / 2)


def test_a_version_that_several_learners_record_counts_once() -> None:
    learners = Learners()
    for _ in range(2):
        learners.add(merged(1.0, 1, (0, 24, 1.0)))
    learners.add(merged(2.0, 2, (0, 48, 1.0)))
    [figures] = learners.figures()
    assert (figures.step, figures.version, figures.speed) == (48, 2, 24.0)


def test_timeline_is_drawn(tmp_path: Path) -> None:
    chart = storm().chart()
    assert chart is not None and "Goodput: 89%" in chart.caption
    draw(chart, tmp_path / "learners.svg")
    assert (tmp_path / "learners.svg").stat().st_size > 1000
    assert Learners().chart() is None
