"""The page of a training: what its records say, a verdict from them, and charts that a browser draws."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reports.browser import CHROMIUM, MISSING, open_page
from tests.reports.test_step_figures import training
from thinwire.errors import ConfigError
from thinwire.reports.recorded_run import RecordedRun, read_run
from thinwire.reports.step_figures import RecordedSteps
from thinwire.reports.training_page import charts, page, tensors_table, verdict
from thinwire.runtime.metrics import JsonLines
from thinwire.telemetry import StepRecord

OUTCOME = {
    "design": "3lc[s=1.75]",
    "model": "lenet <5>",
    "data": "digits",
    "workers": 2,
    "link": "10mbit",
    "steps": 60,
    "seed": 7,
    "test_accuracy": 0.875,
    "curve": [{"step": 30, "seconds": 20.0, "accuracy": 0.5}, {"step": 60, "seconds": 40.0, "accuracy": 0.875}],
    "weights": "0123",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A folder with a file for each worker, one of them damaged, the run's outcome, and files of something else."""
    folder = tmp_path_factory.mktemp("run")
    for rank in range(2):
        writer = JsonLines(folder / f"{rank}.jsonl")
        for record in training(60):
            if record.rank == rank:
                writer.record(record)
        writer.close()
    with (folder / "1.jsonl").open("ab") as file:
        file.write(b'{"step":60,"tab\n')
    (folder / "journal.jsonl").write_text('{"event":"began"}\n')
    (folder / "a.json").write_text("[1, 2")
    (folder / "outcome.json").write_text(json.dumps(OUTCOME))
    return read_run(folder)


def test_what_is_read(run: RecordedRun) -> None:
    assert [file.name for file in run.files] == ["0.jsonl", "1.jsonl"]
    assert (run.damaged, run.recorded.runs, run.figures().ranks) == (1, 1, 2)
    assert run.figures().accuracy == 0.875 and run.accuracies() == [(20.0, 0.5), (40.0, 0.875)]
    assert [chart.name for chart in charts(run)] == ["time", "bytes", "tensors", "lag", "scores"]
    assert len(tensors_table(run.figures()).lines) == 2
    alone = read_run(run.files[0])
    assert (alone.outcome, alone.accuracies(), alone.figures().ranks) == (None, [], 1)


def write_run(folder: Path, outcomes: Mapping[str, Mapping[str, object]], accuracy: float | None = None) -> None:
    """Records of two workers and 60 steps, and outcomes in files of these names, which are of one age."""
    writer = JsonLines(folder / "steps.jsonl")
    for record in training(60):
        writer.record(record)
    if accuracy is not None:
        writer.record(StepRecord.of_scores(59, 0, 200.0, None, accuracy))
    writer.close()
    for name, changes in outcomes.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps({**OUTCOME, **changes}))
        os.utime(file, (1000.0, 1000.0))


def test_the_newest_outcome_that_fits_the_records_is_taken(tmp_path: Path) -> None:
    others = {"a": {"steps": 61}, "d": {"workers": 4}}
    write_run(tmp_path, {**others, "b": {"seed": 1}, "c": {"seed": 2}, "e": {"test_accuracy": None}})
    os.utime(tmp_path / "c.json", (2000.0, 2000.0))
    found = read_run(tmp_path)
    assert found.outcome is not None and (found.outcome.seed, found.remark) == (2, "")
    assert found.outcome_file == tmp_path / "c.json" and len(found.outcome_files) == 5
    os.utime(tmp_path / "e.json", (3000.0, 3000.0))
    assert read_run(tmp_path).outcome_file == tmp_path / "e.json", "the model was not evaluated"


@pytest.mark.parametrize(
    ("outcomes", "remark"),
    [
        (
            {"a": {"workers": 4}},
            "a.json seems to be of another run than these records of 2 workers and 60 steps, by workers, ",
        ),
        ({"a": {"seed": 1}, "b": {"seed": 2}}, "a.json, b.json fit these records of 2 workers and 60 steps alike, and"),
    ],
)
def test_without_one_outcome_that_fits_there_is_no_accuracy_and_the_page_says_why(
    outcomes: dict[str, dict[str, object]], remark: str, tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    write_run(tmp_path, outcomes)
    with pytest.warns(UserWarning, match=f"No outcome is shown: {remark}"):
        found = read_run(tmp_path)
    assert (found.outcome, found.outcome_file, found.figures().accuracy, found.accuracies()) == (None, None, None, [])
    assert len(found.outcome_files) == len(outcomes)
    assert found.remark.startswith(f"No outcome is shown: {remark}") and found.remark in page(found, "thinwire report")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder; expected what --telemetry wrote"):
        read_run(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"no \*.jsonl in it has a step record"):
        read_run(tmp_path)
    (tmp_path / "other.jsonl").write_bytes(b"\x00\xff\n" * 9)
    with pytest.raises(ConfigError, match="it has no step record; expected the JSON lines"):
        read_run(tmp_path / "other.jsonl")


def test_verdicts_follow_from_the_figures(run: RecordedRun) -> None:
    figures = replace(run.figures(), lag=3.0)
    said = " ".join(verdict(figures))
    # 8,040 bytes less 200 and half of that each way, in the 100 ms that encoding takes
    assert "40.2× less travels" in said and "below 314 kbit/s each way" in said and "wait in the residual" not in said
    assert "Exchanges take 30% of a step of 500 ms, 10% waiting." in said
    assert "holds the training up" in " ".join(verdict(replace(figures, wait_s=0.4)))
    assert "20 steps of updates wait in the residual of fc.weight" in " ".join(verdict(replace(figures, lag=20.0)))
    assert verdict(replace(figures, ratio=1.0))[0].startswith("Nothing is saved")
    assert verdict(replace(figures, ratio=0.0))[0] == "Nothing travelled."
    assert "what it costs was not recorded" in verdict(replace(figures, encode_s=0.0))[0]
    [*_, lost] = verdict(replace(figures, lost_at=12))
    assert lost == "The loss is NaN or Inf since step 12: the training has diverged."
    assert not any("Exchanges take" in sentence for sentence in verdict(replace(figures, step_s=None)))


def test_verdicts_where_one_way_is_plain_or_nothing_comes_back() -> None:
    def said(ways: int, push: int, pull: int, share: float = 1.0) -> str:
        steps = (
            StepRecord(
                step=step,
                table="fc",
                numel=250_000,
                payload_bytes_push=push,
                payload_bytes_pull=pull,
                encode_s=0.004,
                decode_s=0.004,
                ways=ways,
                share=share,
            )
            for step in range(9)
        )
        return verdict(RecordedSteps(steps).figures())[0]

    assert "125.0× less travels" in said(2, 8_000, 8_000) and "below 992 Mbit/s" in said(2, 8_000, 8_000)
    assert "62.5× less travels" in said(1, 16_000, 0) and "below 984 Mbit/s" in said(1, 16_000, 0)
    assert "2.0× less travels" in said(1, 500_000, 0) and "below 500 Mbit/s" in said(1, 500_000, 0)
    assert "2.0× less travels" in said(2, 8_000, 1_000_000) and "below 496 Mbit/s" in said(2, 8_000, 1_000_000)
    # Of four ranks each sends and receives three quarters of gradients, and as much of averages.
    assert "125.0× less travels" in said(2, 6_000, 6_000, 0.75) and "below 1.49 Gbit/s" in said(2, 6_000, 6_000, 0.75)


@pytest.mark.skipif(not CHROMIUM, reason=MISSING)
def test_a_browser_draws_every_chart(run: RecordedRun, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    old = RecordedSteps(StepRecord(step=step, table="a</script><b>", numel=9) for step in range(2))
    bare = RecordedRun(name="old", recorded=old, files=(Path("old.jsonl"),), damaged=0)
    for shown in (run, bare):
        path = tmp_path / f"{shown.name}.html"
        path.write_text(page(shown, "thinwire report run"))
        opened = open_page(path, tmp_path / "profile")
        assert opened.console == []
        assert "data-errors" not in opened.html.partition(">")[2][:500]
        drawn = dict(re.findall(r'<div class="chart[^"]*" id="([^"]+)"[^>]*?( data-drawn="yes")?[^>]*>', opened.html))
        assert drawn == {chart.name: ' data-drawn="yes"' for chart in charts(shown)}
        assert opened.html.count('<svg class="main-svg"') >= len(drawn)
        text = html.unescape(re.sub(r"<[^>]+>", " ", opened.html))
        for sentence in verdict(shown.figures()):
            assert sentence in text
        for cells in tensors_table(shown.figures()).lines:
            assert all(cell in html.unescape(opened.html) for cell in cells), cells
    assert "3lc[s=1.75], lenet <5> on digits, 2 workers, 60 steps, link 10mbit, seed 7." in html.unescape(
        (tmp_path / f"{run.name}.html").read_text()
    )
