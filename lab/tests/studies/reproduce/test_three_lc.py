"""3LC's items, from trainings that are told."""

from __future__ import annotations

import pytest

from thinwire_lab.jobs.history import StepHistory
from thinwire_lab.studies.reproduce import stand_ins
from thinwire_lab.studies.reproduce.entry import Scale, Shown
from thinwire_lab.studies.reproduce.three_lc import ENTRIES
from thinwire_lab.studies.reproduce.three_lc_riddles import LAG
from thinwire_lab.studies.reproduce.timings import MESSAGES, TimingCell, TimingFinding
from thinwire_lab.studies.reproduce.trainings import TrainingFinding


def trained(evaluations: list[tuple[int, float]]) -> TrainingFinding:
    history = StepHistory(
        losses=[1.0], bits_push=[1.0], bits_pull=[1.0], payload_bytes_push=[1], payload_bytes_pull=[1], lags=[1.0]
    )
    return TrainingFinding(
        evaluations=evaluations,
        test_loss=1.0,
        bits_push=1.0,
        bits_pull=1.0,
        compression_ratio=1.0,
        lag=1.0,
        lr=0.01,
        batch=16,
        weights="",
        history=history,
    )


def test_the_papers_line_is_of_what_the_axis_says() -> None:
    """By table 1 s = 1.75 ends at 93.51 %, s = 1.0 at 93.32 % and float at 93.37 %."""
    study = LAG.study
    assert study is not None
    shown = study.show({cell: trained([(1, 0.9)]) for cell in study.cells("quick")})
    [panel] = shown.charts[0].panels
    [paper] = [series for series in panel.series if series.role == "paper"]
    assert panel.y_label == "s = 1.75 minus s = 1.0, points"
    assert list(paper.y) == pytest.approx([0.19, 0.19]) and "+0.19 points" in shown.notes[0]


def test_half_way_is_at_half_of_the_steps() -> None:
    [study] = [entry.study for entry in ENTRIES if entry.item == "figure-4"]
    assert study is not None
    curve = [(step, step / 1000) for step in range(50, 501, 50)]
    shown = study.show({cell: trained(curve) for cell in study.cells("quick")})
    assert shown.tables[0].header[-2:] == ["accuracy % half-way", "at the end"]
    assert {tuple(line[-2:]) for line in shown.tables[0].lines} == {("25.00", "50.00")}


def timed(item: str, scale: Scale) -> Shown:
    """An item of trainings and of seconds, which are ten milliseconds a step."""
    [study] = [entry.study for entry in ENTRIES if entry.item == item]
    assert study is not None
    seconds = TimingFinding(seconds_per_step=0.01)
    cells = study.cells(scale)
    return study.show({cell: seconds if isinstance(cell, TimingCell) else trained([(1, 0.9)]) for cell in cells})


@pytest.mark.parametrize("item", ["table-1", "figure-3", "figure-5"])
def test_seconds_are_said_to_be_of_one_short_run(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside "3 seeds" and "8,000 steps", which are the accuracies'."""
    monkeypatch.setattr(stand_ins, "is_here", lambda name: True)
    full = timed(item, "full").setting
    assert "8,000 steps" in full and "3 seeds, in one process. Seconds: one run of 800 steps on each link." in full
    assert timed(item, "quick").setting.endswith("1 seed, in one process. Seconds: one run of 50 steps on each link.")


@pytest.mark.parametrize("item", ["table-1", "figure-3", "figure-5"])
def test_notes_say_which_costs_of_the_modelled_seconds_are_set(item: str) -> None:
    assert any("computed links" in note and note.endswith(MESSAGES) for note in timed(item, "tiny").notes)
