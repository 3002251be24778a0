"""The page of a training: what its records say, a verdict from them, and charts."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reports.test_step_figures import training
from thinwire.errors import ConfigError
from thinwire.reports.recorded_run import RecordedRun, read_run
from thinwire.reports.step_figures import RecordedSteps
from thinwire.reports.training_page import charts, page, tensors_table, verdict
from thinwire.runtime.metrics import JsonLines
from thinwire.telemetry import StepRecord


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A folder with a file for each worker, one of them damaged, and a file of something else."""
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
    return read_run(folder)


def test_what_is_read(run: RecordedRun) -> None:
    assert [file.name for file in run.files] == ["0.jsonl", "1.jsonl"]
    assert (run.damaged, run.recorded.runs, run.recorded.figures().ranks) == (1, 1, 2)
    assert [chart.name for chart in charts(run)] == ["time", "bytes", "tensors", "lag", "scores"]
    assert len(tensors_table(run.recorded.figures()).lines) == 2
    alone = read_run(run.files[0])
    assert (alone.damaged, alone.recorded.figures().ranks) == (0, 1)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder; expected what --telemetry wrote"):
        read_run(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"no \*.jsonl in it has a step record"):
        read_run(tmp_path)
    (tmp_path / "other.jsonl").write_bytes(b"\x00\xff\n" * 9)
    with pytest.raises(ConfigError, match="it has no step record; expected the JSON lines"):
        read_run(tmp_path / "other.jsonl")


def test_verdicts_follow_from_the_figures(run: RecordedRun) -> None:
    figures = replace(run.recorded.figures(), lag=3.0)
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


def test_a_page_has_every_chart_with_a_text_in_its_place_every_sentence_and_every_cell(run: RecordedRun) -> None:
    old = RecordedSteps(StepRecord(step=step, table="a</script><b>", numel=9) for step in range(2))
    bare = RecordedRun(name="old", recorded=old, files=(Path("old.jsonl"),), damaged=0)
    for shown in (run, bare):
        made = page(shown, "thinwire report run")
        text = html.unescape(re.sub(r"<[^>]+>", " ", made))
        drawn = dict(re.findall(r'<img id="([^"]+)" alt="([^"]+)" src="data:image/svg\+xml;base64,', made))
        assert {name: html.unescape(alt) for name, alt in drawn.items()} == {
            chart.name: chart.caption for chart in charts(shown)
        }
        assert all(sentence in text for sentence in verdict(shown.recorded.figures()))
        assert all(html.escape(cell) in made for line in tensors_table(shown.recorded.figures()).lines for cell in line)
        assert "<script" not in made
