"""`thinwire report`: the page is written beside the records, and its verdict is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.commands import Result
from tests.reports.test_step_figures import training
from thinwire.runtime.metrics import JsonLines

Command = Callable[..., Result]


def record_steps(file: Path) -> None:
    writer = JsonLines(file)
    for record in training(20):
        writer.record(record)
    writer.close()


def test_the_page_is_written_and_the_verdict_printed(command: Command, tmp_path: Path) -> None:
    steps = tmp_path / "run" / "steps.jsonl"
    steps.parent.mkdir()
    record_steps(steps)
    result = command("report", steps, "--json", tmp_path / "out.json")
    assert result.status == 0 and "compression pays on links below 314 kbit/s each way" in result.out
    assert (tmp_path / "run" / "steps.html").read_text().startswith("<!doctype html>")
    saved = json.loads((tmp_path / "out.json").read_text())
    assert (saved["steps"], saved["warm_up"], len(saved["verdict"])) == (15, 5, 4)
    assert command("report", steps, "--out", tmp_path / "my page.html").status == 0
    assert (
        f"Made by: thinwire report {steps} --out &#x27;{tmp_path}/my page.html&#x27;."
        in (tmp_path / "my page.html").read_text()
    )
    assert command("report", tmp_path / "run").status == 0
    assert (tmp_path / "run" / "report.html").exists()


def test_misuse_is_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text("{}\n")
    for path in (tmp_path, tmp_path / "steps.jsonl", tmp_path / "missing"):
        result = command("report", path)
        assert result.status == 2 and result.err.count("\n") == 1 and "--telemetry" in result.err, path


def test_a_page_is_not_written_over_its_records(command: Command, tmp_path: Path) -> None:
    steps = tmp_path / "steps.html"
    steps.write_text('{"step":0,"table":"fc","numel":5}\n' * 2)
    for out in ([], ["--out", f"{tmp_path}/./steps.html"]):
        result = command("report", steps, *out)
        assert result.status == 2 and "steps.html is where the step records" in result.err
    assert steps.read_text().startswith("{")
