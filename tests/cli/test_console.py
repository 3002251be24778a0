"""Tables in a terminal: what is cut where a terminal is narrow, and what is not."""

from __future__ import annotations

import pytest
from rich.console import Console

from thinwire.cli import console as printing
from thinwire.presentation.tables import Table


@pytest.mark.parametrize(("width", "columns", "whole"), [(100, 9, True), (24, 1, True)])
def test_table_keeps_names_whole_where_there_is_room_and_figures_always(
    width: int, columns: int, whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = [f"a head that is long, {each}" for each in range(columns)]
    monkeypatch.setattr(printing, "console", Console(width=width))
    printing.show(Table(["design", *heads], [["3lc[sparsity=1.75]", *["22.8"] * columns]]))
    shown = capsys.readouterr().out
    assert ("3lc[sparsity=1.75]" in shown, shown.count("22.8")) == (whole, columns)


def test_table_without_room_has_a_line_for_every_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table(["", "fp32", "3lc[s=1.0]"], [["steps", "1,000", "[2,000]"], ["loss", "0.5", "0.25"]], "two runs")
    monkeypatch.setattr(printing, "console", Console(width=20))
    printing.show(table)
    assert capsys.readouterr().out.splitlines() == [
        *("two runs", ""),
        *("steps", "fp32: 1,000", "3lc[s=1.0]: [2,000]", ""),
        *("loss", "fp32: 0.5", "3lc[s=1.0]: 0.25"),
    ]
