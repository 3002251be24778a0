"""`thinwire bench`: output, files, interruptions and failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Result
from thinwire_lab.bench.cells import MemoryCell
from thinwire_lab.bench.memory import MemoryBench, MemoryRun
from thinwire_lab.bench.options import QUICK, PaysOptions
from thinwire_lab.bench.pays import PaysBench
from thinwire_lab.cli import bench
from thinwire_lab.jobs import cluster

Command = Callable[..., Result]


def test_interrupted_bench_keeps_its_runs_and_resumes(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[MemoryCell] = []

    def measure(bench: MemoryBench, cell: MemoryCell, before: object, tell: Callable[[str], None]) -> MemoryRun:
        tell("going")
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(cell)
        return MemoryRun(held=10.0 * len(made), peak=0.5, fixed_nbytes=0.0)

    monkeypatch.setattr(MemoryBench, "measure", measure)
    file = tmp_path / "new" / "memory.json"
    methods = [text for name in ("alone", "none", "update") for text in ("--hook", name)]
    arguments = ("bench", "memory", *methods, "--json", file)
    result = command(*arguments)
    assert result.status == 130 and "interrupted" in result.err
    assert "10.0 bytes a parameter" in result.out and f"wrote {file}" in result.out.replace("\n", "")
    assert len(json.loads(file.read_text())["runs"]) == 2
    assert command(*arguments).status == 2, "a file that is there is added to with --resume alone"
    made.clear()
    result = command(*arguments, "--resume")
    assert (result.status, result.err) == (0, "") and len(made) == 1
    written = json.loads(file.read_text())
    assert [row["held"] for row in written["rows"]] == [10.0, 20.0, 10.0]


def test_bench_reports_unshapeable_links_before_measuring(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "available", lambda: (False, "no namespaces here"))
    file = tmp_path / "out.json"
    result = command("bench", "hooks", "--json", file)
    assert result.status == 1 and result.out == "" and not file.exists()
    assert result.err == "error: the kernel cannot shape links here: no namespaces here\n"


def test_pays_quick_keeps_given_options(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PaysBench] = []
    monkeypatch.setattr(bench, "measure", lambda asked, *given, **options: made.append(asked))
    usual = PaysOptions()
    assert command("bench", "pays", "--quick", "--seconds", str(usual.seconds)).status == 0
    assert command("bench", "pays", "--quick", "--links", ",".join(usual.links)).status == 0
    seconds, links = made
    assert (seconds.seconds, seconds.links) == (usual.seconds, QUICK["links"])
    assert (links.seconds, list(links.links)) == (QUICK["seconds"], list(usual.links))
