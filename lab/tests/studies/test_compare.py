"""Comparisons: their runs, stored results and rows; one real, the others from made-up outcomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from lab.tests.jobs.outcomes import run_outcome
from thinwire.codecs.registry import codec
from thinwire.errors import ConfigError, EngineError
from thinwire.presentation.page import write_page
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.studies.compare import Comparison, Train, compare, jobs, varies
from thinwire_lab.studies.compare_page import page
from thinwire_lab.studies.compare_rows import tabulate

TWO = Comparison(designs=["fp32", "3lc[s=1.75,entropy=zstd]"], links=["1mbit", "none"], seeds=2, steps=400)


def told(job: Job) -> RunOutcome:
    """An outcome made from the job: 3LC is 10 points worse and, on a link, 4 times as fast."""
    assert job.steps is not None
    plain = job.design == "fp32"
    seconds_per_step = 0.01 if job.link is None else 0.4 if plain else 0.1
    return run_outcome(
        design=job.design,
        steps=job.steps,
        link=job.link or "none",
        shaping="none" if job.link is None else "kernel",
        seconds=(job.steps - 1) * seconds_per_step,
        seconds_per_step=seconds_per_step,
        test_accuracy=(0.9 if plain else 0.8) + 0.02 * job.seed,
        bits_per_value_push=32.0 if plain else 0.5,
        bits_per_value_pull=32.0 if plain else 0.25,
        compression_ratio=1.0 if plain else 80.0,
    )


def noting(made: list[Job]) -> Train:
    def train(job: Job) -> RunOutcome:
        made.append(job)
        return told(job)

    return train


def test_compare_with_real_runs(tmp_path: Path) -> None:
    """Real outcomes, of runs in one process that pose as runs on a link."""
    asked = Comparison(designs=["3lc"], links=["100mbit"], workers=1, steps=40, short_steps=10)

    def train(job: Job) -> RunOutcome:
        outcome = in_process.run(replace(job, link=None))
        return outcome if job.link is None else msgspec.structs.replace(outcome, in_process=UNSET, shaping="kernel")

    findings = compare(asked, tmp_path, train)
    [row] = findings.rows
    assert (row.runs, row.steps, row.timed_runs, row.timed_steps) == (1, 40, 1, 10)
    mean = {name: value or 0.0 for name, value in row.means.items()}
    assert 0 < mean["test_accuracy"] <= 1 and 0 < mean["bits_per_value_push"] < 2 and mean["seconds_per_step"] > 0
    assert mean["training_seconds"] == pytest.approx(39 * mean["seconds_per_step"])
    assert mean["speedup"] == 1 and row.means["accuracy_difference"] == 0 and row.deviations["test_accuracy"] is None
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["rows"] == [msgspec.to_builtins(row)] and stored["comparison"]["designs"] == ["3lc"]
    assert len({run["outcome"]["weights"] for run in stored["runs"]}) == 2
    write_page(tmp_path / "report.html", page(findings))
    assert "data:image/svg+xml;base64," in (tmp_path / "report.html").read_text()


# ---- which runs


def test_compare_runs_accuracy_once_and_links_briefly() -> None:
    needed = jobs(
        Comparison(designs=["fp32", "local2", "mps"], links=["10mbit", "1gbit"], steps=500, short_steps=21).cells()
    )
    assert [(job.design, job.link, job.steps) for job in needed] == [
        ("fp32", None, 500),
        ("fp32", "10mbit", 21),
        ("fp32", "1gbit", 21),
        ("local2", None, 500),
        ("local2", "10mbit", 22),
        ("local2", "1gbit", 22),
        ("mps", None, 500),
        ("mps", "10mbit", 24),
        ("mps", "1gbit", 24),
    ], "an exchange, every second or every sixth step, is the last that is timed"


def test_compare_times_shrinking_frames_for_a_tenth_of_the_run() -> None:
    """3LC §4.3: designs with zero runs take 10 % of the standard steps, for their bytes change as they train."""
    both = Comparison(designs=["3lc", "3lc[zero_run=false]"], links=["10mbit"], steps=3000, short_steps=100)
    assert [job.steps for job in jobs(both.cells()) if job.link] == [300, 100]
    assert varies(codec("threshold", tau=0.5)) and not varies(codec("topk"))
    once = Comparison(designs=["3lc"], links=["10mbit"], steps=50, short_steps=100)
    assert [job.steps for job in jobs(once.cells())] == [50, 50], "never longer than the full run"


@pytest.mark.parametrize("design", ["fp32[consistency=local[16, warmup = 90]]", "local-sgd[warmup=90,h=16]"])
def test_compare_times_a_design_with_a_warm_up_in_full(design: str) -> None:
    full, timed = jobs(Comparison(designs=[design], links=["10mbit"], steps=3000).cells())
    assert full.design == design and timed.steps == full.steps == 3000


def test_compare_impossible_options_raise_config_error() -> None:
    impossible: list[tuple[dict[str, Any], str]] = [
        ({"designs": []}, "no designs to compare"),
        ({"designs": ["4lc"]}, "unknown design '4lc'"),
        ({"steps": 1}, "steps=1; at least 2"),
        ({"consistency": "sometimes"}, "unknown consistency 'sometimes'"),
        ({"servers": 2, "servers_on_workers": True}, "2 servers, and one on every worker's node"),
    ]
    for given, text in impossible:
        with pytest.raises(ConfigError, match=text):
            Comparison(**{"designs": ["fp32"], "links": ["1mbit"], **given})


# ---- what is kept


def test_compare_reports_and_repeats_failed_runs(tmp_path: Path) -> None:
    def failing(job: Job) -> RunOutcome:
        if job.design != "fp32" and job.seed == 0:
            raise EngineError("worker 0 ended: <the training has diverged>")
        return told(job)

    results = compare(TWO, tmp_path, failing)
    assert [failure.job["seed"] for failure in results.failures] == [0, 0]
    assert [row.runs for row in results.rows] == [2, 2, 1, 1]
    assert "&lt;the training has diverged&gt;" in page(results)
    again: list[Job] = []
    results = compare(TWO, tmp_path, noting(again))
    assert len(again) == 2 and results.failures == []
    assert "diverged" not in page(results)


# ---- what it comes to


def test_compare_rows_means_deviations_and_times(tmp_path: Path) -> None:
    rows = compare(TWO, tmp_path, told).rows
    assert [(row.design[:4], row.link) for row in rows] == [
        ("fp32", "1mbit"),
        ("fp32", "none"),
        ("3lc[", "1mbit"),
        ("3lc[", "none"),
    ]
    thin = rows[2]
    means, deviations = thin.means, thin.deviations
    assert means["test_accuracy"] == pytest.approx(0.81) and deviations["test_accuracy"] == pytest.approx(0.02 / 2**0.5)
    assert means["accuracy_difference"] == pytest.approx(-0.1)
    assert deviations["accuracy_difference"] == pytest.approx(0, abs=1e-12), "differences within seeds are equal"
    assert means["speedup"] == pytest.approx(4) and thin.timed_steps == 100
    assert means["training_seconds"] == pytest.approx(399 * 0.1)
    assert rows[3].means["seconds_per_step"] == 0.01 and rows[3].timed_steps == 400


def test_compare_page(tmp_path: Path) -> None:
    results = compare(TWO, tmp_path, told)
    text = page(results)
    assert "91.00 ± 1.41" in text and "-10.00 ± 0.00" in text and "0.1000 ± 0.0000 s, 4.0×" in text
    assert "3lc[s=1.75,entropy=zstd]" in text and "seeds 0, 1." in text and text.count("<img") == 1
    assert "http" not in text, "it needs nothing else"
    assert "There is no measurement yet" in page(
        replace(results, runs=[], rows=tabulate(TWO.cells(), lambda job: None))
    )
