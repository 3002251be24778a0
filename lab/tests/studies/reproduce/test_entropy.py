"""Øland & Raj's figures, from made-up trainings."""

from __future__ import annotations

import pytest

from lab.tests.studies.reproduce.findings import shown
from thinwire_lab.studies.reproduce.averages import AveragesCell, AveragesFinding
from thinwire_lab.studies.reproduce.entropy import ENTRIES

EPOCHS = 3


def trained(cell: AveragesCell) -> AveragesFinding:
    """Trainings of seed i end at 50 + i percent."""
    return AveragesFinding(accuracies=[0.5 + cell.seed / 100] * EPOCHS, coded=[4.0], raw=[6.0], rms=[], entropies=[])


@pytest.mark.parametrize("item", ["figure-1", "figure-4"])
def test_one_seed_has_no_deviation_in_table_and_chart(item: str) -> None:
    """± 0.00 would mean equal seeds."""
    one, two = shown(ENTRIES, item, "tiny", trained), shown(ENTRIES, item, "quick", trained)
    assert {line[1] for line in one.tables[0].lines} == {"50.00"} and "1 seed." in one.setting
    assert two.tables[0].lines[0][1] == "50.50 ± 0.71" and "2 seeds." in two.setting
    alone, together = (each.charts[0].panels[0].series[0] for each in (one, two))
    assert (alone.label, alone.error) == ("mean", None)
    assert together.label == "mean ± standard deviation"
    assert together.error is not None and list(together.error) == pytest.approx([0.7071] * len(together.x), rel=1e-3)
