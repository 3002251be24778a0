"""`thinwire reproduce`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.tests.studies.reproduce.test_reproduce import Toss, Tossed, entry
from tests.cli.commands import Result
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.studies.reproduce import catalog
from thinwire_lab.studies.reproduce.catalog import CATALOG
from thinwire_lab.studies.reproduce.entry import Scale

Command = Callable[..., Result]


def test_reproduce_list_names_all_entries(command: Command, tmp_path: Path) -> None:
    result = command("reproduce", "list", "--json", tmp_path / "list.json")
    assert (result.status, result.err) == (0, "")
    assert all(each.id in result.out for each in CATALOG)
    listed = json.loads((tmp_path / "list.json").read_text())
    assert {each["id"]: each["status"] for each in listed} == {each.id: each.status for each in CATALOG}


def test_reproduce_shows_runs_and_explains_how_to_continue(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = [replace(entry(), cells=_interrupted)]
    monkeypatch.setattr(catalog, "entries", lambda what: chosen)
    monkeypatch.setattr(catalog, "finding_kinds", lambda: list(entry().kinds))
    asked = ("reproduce", "3lc-figure-99", "--out", tmp_path / "my out")
    result = command(*asked)
    assert result.status == 130
    again = f"continue with: thinwire reproduce 3lc-figure-99 --scale quick --out '{tmp_path}/my out'"
    assert f"{again}\n" in result.out
    result = command(*asked, "--json", tmp_path / "my shown.json")
    assert f"{again} --json '{tmp_path}/my shown.json'\n" in result.out
    chosen[:] = [entry()]
    result = command(*asked, "--json", tmp_path / "shown.json")
    assert (result.status, result.err) == (0, "")
    assert "1/2  toss 0" in result.out and "</script> is text" in result.out and "report.html" in result.out
    [shown] = json.loads((tmp_path / "shown.json").read_text())["entries"]
    assert (shown["id"], shown["title"]) == ("3lc-figure-99", entry().title)
    assert shown["tables"][0]["lines"][0][:3] == ["a < b", "1", "10"]


def test_json_over_the_folders_files_raises_config_error(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(catalog, "entries", lambda what: [entry()])
    (tmp_path / "report.html").write_text("kept")
    result = command("reproduce", "3lc-figure-99", "--out", tmp_path, "--json", tmp_path / "report.html")
    assert result.status == 2 and "is where the runs are kept" in result.err
    assert (tmp_path / "report.html").read_text() == "kept"


def test_reproduce_unknown_name_suggests_similar_names(command: Command) -> None:
    result = command("reproduce", "3lc-figur-6")
    assert result.status == 2 and "did you mean 3lc-figure-6" in result.err


def _more(scale: Scale) -> list[Toss]:
    return [Toss(number=7)]


def _interrupted(scale: Scale) -> list[Toss]:
    return [Interrupting(number=0), *_more(scale)]


class Interrupting(Toss, frozen=True, kw_only=True, tag="Toss"):
    def run(self, tell: Tell) -> Tossed:
        raise KeyboardInterrupt
