"""Øland & Raj's figures, from trainings that are told."""

from __future__ import annotations

import msgspec
import pytest

from thinwire_lab.studies.reproduce.averages import HISTOGRAM_BITS, SHARES, AveragesFinding
from thinwire_lab.studies.reproduce.entropy import ENTRIES
from thinwire_lab.studies.reproduce.entry import Found, Scale, Shown

EPOCHS = 3


def shown(item: str, data: str) -> Shown:
    """An item of the probed training, in which a share of the weights is off by that share."""
    [study] = [entry.study for entry in ENTRIES if entry.item == item]
    assert study is not None
    [cell] = study.cells("quick")
    entropies = [[[1.0 - share + epoch for share in SHARES] for _ in HISTOGRAM_BITS] for epoch in range(EPOCHS)]
    finding = AveragesFinding(
        accuracies=[0.5] * EPOCHS,
        coded=[4.0] * EPOCHS,
        raw=[6.0] * EPOCHS,
        rms=[[0.1, 0.2, 0.3]] * EPOCHS,
        entropies=[[entropies[epoch]] * 3 for epoch in range(EPOCHS)],
    )
    return study.show(Found({msgspec.structs.replace(cell, data=data): finding}))


def trained(item: str, scale: Scale) -> Shown:
    """An item whose trainings of seed i end at 50 + i percent."""
    [study] = [entry.study for entry in ENTRIES if entry.item == item]
    assert study is not None
    found = {
        cell: AveragesFinding(accuracies=[0.5 + cell.seed / 100] * EPOCHS, coded=[4.0], raw=[6.0], rms=[], entropies=[])
        for cell in study.cells(scale)
    }
    return study.show(Found(found))


@pytest.mark.parametrize("item", ["figure-1", "figure-4"])
def test_one_seed_has_no_deviation_in_table_and_chart(item: str) -> None:
    """± 0.00 would say that seeds agree."""
    one, two = trained(item, "tiny"), trained(item, "quick")
    assert {line[1] for line in one.tables[0].lines} == {"50.00"} and "1 seed." in one.setting
    assert two.tables[0].lines[0][1] == "50.50 ± 0.71" and "2 seeds." in two.setting
    alone, together = (each.charts[0].panels[0].series[0] for each in (one, two))
    assert (alone.label, alone.error) == ("mean", None)
    assert together.label == "mean ± standard deviation"
    assert together.error is not None and list(together.error) == pytest.approx([0.7071] * len(together.x), rel=1e-3)


@pytest.mark.parametrize(
    ("data", "first", "shares"),
    [
        ("fashion-mnist[train=2000]", "784 × 392", ["", "", ""]),
        ("digits[train=200]", "64 × 392", ["", " (4.0%)", " (4.0%)"]),
    ],
)
def test_columns_say_which_share_was_taken_where_it_is_another(data: str, first: str, shares: list[str]) -> None:
    [table] = shown("figure-3", data).tables
    assert [line[0] for line in table.lines] == [first, "392 × 50", "50 × 10"]
    off = ["0.900", "0.970", "0.990"]
    assert table.lines[0][1:4] == [f"{each}{share}" for each, share in zip(off, shares, strict=True)]
    assert table.lines[1][1:4] == ["0.900", "0.970 (5.1%)", "0.990 (5.1%)"]
    assert table.lines[2][1:4] == [f"{each} (100.0%)" for each in off]
    [panel, *_] = shown("figure-3", data).charts[0].panels
    names = [series.label for series in panel.series]
    assert names[2:] == ["392 × 50, 1", "392 × 50, 0.051", "50 × 10, 1"]
