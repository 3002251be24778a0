"""3LC's items, from made-up trainings."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire_lab.jobs.history import StepHistory
from thinwire_lab.studies.reproduce.entry import Found
from thinwire_lab.studies.reproduce.job_cells import TrainingFinding
from thinwire_lab.studies.reproduce.three_lc import ENTRIES
from thinwire_lab.studies.reproduce.three_lc_lag import LAG


def trained(*evaluations: tuple[int, float], losses: tuple[float, ...] = (1.0,)) -> TrainingFinding:
    """Returns a finding with these evaluations and losses; everything else is 1."""
    history = StepHistory(losses=list(losses), bits_push=[1.0], bits_pull=[1.0])
    figures: dict[str, Any] = dict.fromkeys(("bits_push", "bits_pull", "compression_ratio", "lag"), 1.0)
    return TrainingFinding(evaluations=list(evaluations) or [(1, 0.9)], lr=0.01, batch=16, history=history, **figures)


def test_lag_papers_line_matches_the_axis() -> None:
    """By table 1 s = 1.75 ends at 93.51 %, s = 1.0 at 93.32 % and float at 93.37 %."""
    study = LAG[0].study
    assert study is not None
    shown = study.show(Found({cell: trained() for cell in study.cells("quick")}))
    [panel] = shown.charts[0].panels
    [paper] = [series for series in panel.series if series.role == "paper"]
    assert panel.y_label == "s = 1.75 minus s = 1.0, points" and list(paper.y) == pytest.approx([0.19, 0.19])


def test_figure_4_half_way_is_at_half_of_the_steps() -> None:
    [study] = [entry.study for entry in ENTRIES if entry.item == "figure-4"]
    assert study is not None
    curve = trained(*((step, step / 1000) for step in range(50, 501, 50)))
    shown = study.show(Found(dict.fromkeys(study.cells("quick"), curve)))
    assert shown.tables[0].header[-2:] == ["accuracy % half-way", "at the end"]
    assert {tuple(line[-2:]) for line in shown.tables[0].lines} == {("25.00", "50.00")}
