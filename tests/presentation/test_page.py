"""Pages are written whole, whatever their text holds."""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from thinwire.errors import ConfigError
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.page import chart_html, document, table_html, write_page
from thinwire.presentation.tables import Table


def test_a_page_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "new" / "page.html"
    write_page(page, "the old one")

    def fails(*_: object) -> None:
        assert page.read_text() == "the old one", "it is there until the new one is whole"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(ConfigError, match=r"page\.html cannot be written: No space left on device"):
        write_page(page, "a new one")
    assert page.read_text() == "the old one" and [each.name for each in page.parent.iterdir()] == [page.name]


def test_a_narrow_screen_has_every_cell_on_a_line_and_panels_one_below_the_other() -> None:
    """Nothing is cut off at its edge, and no panel is too small to be read."""
    table = table_html(Table(["tensor", "up & down"], [["fc", "1 kB"]]))
    assert '<td data-head="up &amp; down">1 kB</td>' in table
    style = document("", [table]).partition("@media (max-width: 45rem)")[2]
    assert "attr(data-head)" in style and "display: block" in style
    panels = [Panel(title="", x_label="", y_label="", series=[Series(label="a", x=[1.0], y=[1.0])])] * 3
    narrow, wide = re.findall(r'(?:srcset|src)="data:image/svg\+xml;base64,([^"]+)"', made(panels))
    sizes = [re.search(rb'width="([0-9.]+)pt"', base64.b64decode(each)) for each in (narrow, wide)]
    widths = [float(each[1]) for each in sizes if each]
    assert widths[0] < 450 and widths[1] > 2 * widths[0]
    assert made(panels[:1]).count("base64") == 1, "one panel is the same at any width"


def made(panels: Sequence[Panel]) -> str:
    return chart_html(Chart(name="chart", caption="", panels=panels), "")


def test_what_is_no_utf_8_is_spelled_out(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "from caf\udce9 ×")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "from caf\\udce9 ×"
