"""Tables in a terminal: what is cut where a terminal is narrow, and what is not."""

from __future__ import annotations

import sys

import pytest
from rich.console import Console

from tests.cli.commands import Full
from thinwire.cli import console as printing
from thinwire.presentation.tables import Table


@pytest.mark.parametrize(("width", "columns", "whole"), [(100, 9, True), (24, 1, True)])
def test_names_stay_whole_where_there_is_room_and_figures_always(
    width: int, columns: int, whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = [f"a head that is long, {each}" for each in range(columns)]
    monkeypatch.setattr(printing, "console", Console(width=width))
    printing.show(Table(["design", *heads], [["3lc[sparsity=1.75]", *["22.8"] * columns]]))
    shown = capsys.readouterr().out
    assert ("3lc[sparsity=1.75]" in shown, shown.count("22.8")) == (whole, columns)


def test_where_no_table_has_room_every_cell_has_a_line(
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


def test_lines_of_progress_on_a_full_disk_end_no_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printing.Lines()
    monkeypatch.setattr(sys, "stdout", Full())
    for _ in range(2):
        lines.say("step 1", always=True)
    printing.console.print("nor does what comes after them")
    assert capsys.readouterr().err.count("all else goes on") == 1
    sys.stdout.close()
