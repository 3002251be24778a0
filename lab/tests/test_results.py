"""The program that makes the page Results: one small measurement is really made."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from tests.test_docs import check_command
from thinwire.presentation.tables import Table
from thinwire_lab.results import __main__ as program
from thinwire_lab.results.making import Measurement, catalogue

TINY = Measurement(
    title="Tiny",
    commands=["bench codecs --elements 1000 --zero-fraction 0.9 --turns 1 --only int8 --only bf16"],
    minutes=1,
    keys=["codec"],
    values=["bits/value", "values"],
)


def test_catalogue_names_commands_that_exist() -> None:
    for given in catalogue().values():
        for command in given.all_commands():
            check_command(f"thinwire {command}")


def test_results_measure_what_is_missing_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without = msgspec.structs.replace(TINY, needs=["CUDA"])
    monkeypatch.setattr(program, "catalogue", lambda: {"tiny": TINY, "gpu": without})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = ["--folder", str(tmp_path)]
    assert program.main(given) == 0
    page, first = (tmp_path / "results.md").read_text(), (tmp_path / "tiny.json").read_bytes()
    assert "|codec|bits/value|values|\n|---|---:|---:|\n|int8|8.000|1,000|\n|bf16|16.000|1,000|" in page
    assert page.count("No finished result") == 1 and not (tmp_path / "gpu.json").exists()
    assert program.main(given) == 0 and (tmp_path / "tiny.json").read_bytes() == first

    # An interrupted measurement continues from its runs; one of other sources does not.
    unfinished = json.loads(first) | {"finished": False}
    (tmp_path / "tiny.json").write_text(json.dumps(unfinished))
    runs = tmp_path / "runs" / "tiny" / "0.json"
    stored = json.loads(runs.read_text())
    stored["runs"][0]["outcome"]["bits_per_value"] = 9.0
    runs.write_text(json.dumps(stored))
    assert program.main(given) == 0
    assert "|int8|9.000|1,000|" in (tmp_path / "results.md").read_text()
    (tmp_path / "tiny.json").write_text(json.dumps(unfinished | {"sources": "older"}))
    assert program.main(given) == 0
    assert "|int8|8.000|1,000|" in (tmp_path / "results.md").read_text()


def test_results_table_joins_equal_keys_and_spreads_a_column() -> None:
    lines = [["a", "x", "1"], ["a", "y", "2"], ["a", "x", "3"], ["b", "y", "4"]]
    tables = [Table(["model", "link", "ms"], lines), Table(["other"], [["5"]])]
    given = Measurement(title="T", commands=[], minutes=1, keys=["model"], across="link", values=["ms"])
    assert program.arranged(given, tables).lines == [["a", "1, 3", "2"], ["b", "", "4"]]
    joined = msgspec.structs.replace(given, across=None)
    assert program.arranged(joined, tables).lines == [["a", "1, 2, 3"], ["b", "4"]]
