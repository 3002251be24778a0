"""Tables in a terminal: what is cut where a terminal is narrow, and what is not."""

from __future__ import annotations

import pytest
from rich.console import Console

from thinwire.cli import console as printing
from thinwire.jobs.tables import Table


@pytest.mark.parametrize(("width", "columns", "whole"), [(100, 9, True), (24, 1, False)])
def test_names_stay_whole_where_there_is_room_and_figures_always(
    width: int, columns: int, whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = [f"a head that is long, {each}" for each in range(columns)]
    monkeypatch.setattr(printing, "console", Console(width=width))
    printing.show(Table(["design", *heads], [["3lc[sparsity=1.75]", *["22.8"] * columns]]))
    shown = capsys.readouterr().out
    assert ("3lc[sparsity=1.75]" in shown, shown.count("22.8")) == (whole, columns)
