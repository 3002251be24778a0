"""Pages are written whole, whatever their text holds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from thinwire.errors import ConfigError
from thinwire.presentation.page import write_page


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


def test_what_is_no_utf_8_is_spelled_out(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "from caf\udce9 ×")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "from caf\\udce9 ×"
