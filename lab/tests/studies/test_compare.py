"""Comparisons: which runs, kept how, and what they come to; one for real, the others with told outcomes."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from lab.tests.jobs.outcomes import run_outcome
from thinwire.codecs.registry import codec
from thinwire.errors import ConfigError, EngineError
from thinwire.policies import compression
from thinwire.policies.consistency import consistency
from thinwire.presentation.page import write_page
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.studies.compare import Comparison, Train, compare, jobs, varies
from thinwire_lab.studies.compare_page import page
from thinwire_lab.studies.compare_rows import tabulate
from thinwire_lab.workloads.data import DataInfo
from thinwire_lab.workloads.dataset import Dataset

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


def test_designs_differ_in_their_policies() -> None:
    asked = Comparison(designs=["fp32", "fp32[consistency=ssp[5]]", "mps[consistency=bsp]"], links=["10mbit"], steps=9)
    designs = {job.full_design().name: job.full_design() for job in jobs(asked.cells())}
    assert [each.consistency for each in designs.values()] == ["bsp", "ssp[5]", "bsp"]


def test_a_real_comparison(tmp_path: Path) -> None:
    """Real outcomes, of runs in one process that pose as runs on a link."""
    asked = Comparison(designs=["3lc"], links=["100mbit"], workers=1, steps=40, short_steps=10)

    def train(job: Job) -> RunOutcome:
        outcome = in_process.run(replace(job, link=None))
        return outcome if job.link is None else msgspec.structs.replace(outcome, in_process=UNSET, shaping="kernel")

    findings = compare(asked, tmp_path, train)
    [row] = findings.rows
    assert (row.runs, row.steps, row.timed_runs, row.timed_steps) == (1, 40, 1, 10)
    assert row.test_accuracy and row.bits_per_value_push and row.seconds_per_step
    assert 0 < row.test_accuracy <= 1 and 0 < row.bits_per_value_push < 2
    assert row.training_seconds == pytest.approx(39 * row.seconds_per_step)
    assert row.speedup == 1 and row.accuracy_difference == 0 and row.test_accuracy_std is None
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["rows"] == [msgspec.to_builtins(row)] and stored["comparison"]["designs"] == ["3lc"]
    assert len({run["outcome"]["weights"] for run in stored["runs"]}) == 2
    write_page(tmp_path / "report.html", page(findings))
    assert "data:image/svg+xml;base64," in (tmp_path / "report.html").read_text()


# ---- which runs


def test_accuracy_is_measured_once_and_every_link_for_a_short_while() -> None:
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


def test_frames_that_shrink_are_timed_for_a_tenth_of_the_run() -> None:
    """3LC §4.3: designs with zero runs take 10 % of the standard steps, for their bytes change as they train."""
    both = Comparison(designs=["3lc", "3lc[zero_run=false]"], links=["10mbit"], steps=3000, short_steps=100)
    assert [job.steps for job in jobs(both.cells()) if job.link] == [300, 100]
    assert varies(codec("threshold", tau=0.5)) and not varies(codec("topk"))
    once = Comparison(designs=["3lc"], links=["10mbit"], steps=50, short_steps=100)
    assert [job.steps for job in jobs(once.cells())] == [50, 50], "never longer than the full run"


def test_one_exchange_an_epoch_takes_whole_epochs() -> None:
    [_, timed] = jobs(Comparison(designs=["entropy"], links=["10mbit"], steps=1000, short_steps=50).cells())
    assert timed.steps == 126, "42 steps of 4 × 8 are an epoch of the 1,347 digits, and 100 steps are to be timed"


@pytest.mark.parametrize(
    "design",
    [
        "fp32[consistency=local[steps=16,warmup=90]]",
        "fp32[consistency=local[16, warmup = 90]]",
        "local-sgd[h=16,warmup=90]",
        "local-sgd[warmup=90,h=16,codec=3lc[s=1.5]]",
    ],
)
@pytest.mark.parametrize("asked", [{}, {"consistency": "local[steps=16,warmup=90]"}], ids=["own", "given"])
def test_of_a_short_run_as_many_steps_exchange_as_of_the_full_one(design: str, asked: dict[str, Any]) -> None:
    full, timed = jobs(Comparison(designs=[design], links=["10mbit"], steps=3000, **asked).cells())

    def exchanging(job: Job) -> list[bool]:
        policy, steps = consistency(job.full_design().consistency), job.steps or 0
        return [policy.exchanges(step) for step in range(1, steps)]  # the first is not timed

    whole, short = exchanging(full), exchanging(timed)
    assert full.design == design and short[-1] and 99 <= len(short) < 400
    assert abs(sum(whole) / len(whole) * len(short) - sum(short)) < 1, "but for the part of one exchange"


def test_a_short_run_that_is_as_long_as_the_full_one_ends_with_an_exchange() -> None:
    def timed(design: str, steps: int) -> Job:
        return jobs(Comparison(designs=[design], links=["10mbit"], steps=steps).cells())[-1]

    assert timed("fp32[consistency=local[16]]", 50).steps == 48
    assert timed("fp32[consistency=local[16]]", 10).steps == 10, "there is none but at its end"
    warm = "local-sgd[h=16,warmup=90]"
    assert (timed(warm, 110).design, timed(warm, 110).steps) == (warm, 106)
    assert timed(warm, 95).steps == 95 and timed(warm, 80).steps == 80


def test_a_warm_up_that_no_name_says_takes_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a design of another package may have one: nothing tells it to take a shorter one."""
    asked = Comparison(designs=["local-sgd[h=16,warmup=90]"], links=["10mbit"], steps=3000)
    assert [job.design for job in jobs(asked.cells())] == ["local-sgd[h=16,warmup=90]", "local-sgd[h=16,warmup=11]"]
    monkeypatch.setattr("thinwire_lab.studies.compare._WARM_UP", re.compile("what no name says"))
    whole = jobs(asked.cells())[-1]
    assert (whole.design, whole.steps) == ("local-sgd[h=16,warmup=90]", 90 + 2896), "to the last exchange"


def test_seeds_come_one_after_the_other_and_no_run_twice() -> None:
    needed = jobs(TWO.cells())
    assert [job.seed for job in needed] == [0] * 4 + [1] * 4
    assert len(set(needed)) == len(needed), "without a limit the full run is the timed one"
    assert {(job.steps, job.batch, job.lr) for job in needed if job.link is None} == {(400, 8, 0.02)}


def test_comparisons_that_cannot_be() -> None:
    impossible: list[tuple[dict[str, Any], str]] = [
        ({"designs": []}, "no designs to compare"),
        ({"links": ["1mbit", "1mbit"]}, "one is named twice"),
        ({"links": ["10mbit", "10000kbit"]}, "links 10mbit, 10000kbit: one is named twice"),
        ({"links": ["fast"]}, "fast.*mbit"),
        ({"designs": ["4lc"]}, "unknown design '4lc'"),
        ({"models": ["lenet6"]}, "unknown model 'lenet6'"),
        ({"seeds": 0}, "0 seeds"),
        ({"steps": 1}, "steps=1; at least 2"),
        ({"short_steps": 1}, "short_steps=1; at least 2"),
        ({"consistency": "sometimes"}, "unknown consistency 'sometimes'"),
        ({"compression": "by-colour"}, "unknown compression 'by-colour'"),
        ({"servers": 2, "servers_on_workers": True}, "2 servers, and one on every worker's node"),
    ]
    for given, text in impossible:
        with pytest.raises(ConfigError, match=text):
            Comparison(**{"designs": ["fp32"], "links": ["1mbit"], **given})


def test_choices_for_all_designs_are_in_every_job() -> None:
    chosen: dict[str, Any] = {"compression": "by-shape", "placement": "uniform", "servers_on_workers": True}
    needed = jobs(Comparison(designs=["fp32", "3lc"], links=["1mbit", "none"], **chosen).cells())
    assert [asdict(job) | chosen for job in needed] == [asdict(job) for job in needed]


def test_where_a_policy_chooses_the_codecs_frames_may_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression.POLICIES, "shipped", {**compression.POLICIES.shipped, "three": compression.ByShape})
    asked: dict[str, Any] = {"designs": ["fp32"], "links": ["10mbit"], "steps": 3000}
    assert [job.steps for job in jobs(Comparison(**asked).cells())] == [3000, 100]
    assert [job.steps for job in jobs(Comparison(compression="three", **asked).cells())] == [3000, 300]


# ---- what is kept


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path: Path) -> None:
    made: list[Job] = []

    def until_the_fourth(job: Job) -> RunOutcome:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(job)
        return told(job)

    with pytest.raises(KeyboardInterrupt):
        compare(TWO, tmp_path, until_the_fourth)
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 3
    numbers: list[int] = []
    rest: list[Job] = []
    results = compare(
        TWO,
        tmp_path,
        noting(rest),
        on_job=lambda number, total, job: numbers.append(number),
    )
    assert made + rest == jobs(TWO.cells()) and numbers == [4, 5, 6, 7, 8]
    assert results.rows == compare(TWO, tmp_path / "at once", told).rows


def test_a_comparison_can_grow_and_keeps_what_others_measured(tmp_path: Path) -> None:
    compare(Comparison(designs=["fp32"], links=["1mbit"], steps=400), tmp_path, told)
    again: list[Job] = []
    larger = Comparison(designs=["int8", "fp32"], links=["1mbit"], steps=400)
    compare(larger, tmp_path, noting(again))
    assert {job.design for job in again} == {"int8"}
    longer = Comparison(designs=["fp32"], links=["1mbit"], steps=500)
    results = compare(longer, tmp_path, noting(again))
    assert again[-1].design == "fp32" and again[-1].steps == 500, "another number of steps is another run"
    assert len(results.runs) == 5 and [row.design for row in results.rows] == ["fp32"]


def test_runs_of_before_there_was_a_choice_are_those_that_left_it_open(tmp_path: Path) -> None:
    compare(TWO, tmp_path, told)
    path, later = tmp_path / "results.json", ("compression", "servers_on_workers")
    kept = json.loads(path.read_text())
    for run in kept["runs"]:
        run["job"] = {name: value for name, value in run["job"].items() if name not in later}
    kept["comparison"] = {name: value for name, value in kept["comparison"].items() if name not in later}
    path.write_text(json.dumps(kept))
    made: list[Job] = []
    assert page(compare(TWO, tmp_path, noting(made))) and made == []
    compare(replace(TWO, servers_on_workers=True), tmp_path, noting(made))
    results = compare(replace(TWO, compression="by-shape"), tmp_path, noting(made))
    assert len(made) == 16 and len(results.runs) == 24, "another choice is another run, though it may come to the same"
    assert "Chosen for every design: compression=by-shape." in page(results)
    lines = [line for line in page(results).splitlines() if line.startswith("<tr><td>fp32</td><td>mlp")]
    assert len(lines) == 12
    assert sum("<td>compression=by-shape</td>" in line for line in lines) == 4
    assert sum("one on every worker&#x27;s node" in line for line in lines) == 4


def test_runs_on_other_data_of_the_same_name_are_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, other = tmp_path / "usual" / "mnist", tmp_path / "other"
    for each in (usual, other):
        each.mkdir(parents=True)

    def here(*, root: str | None = None) -> list[DataInfo]:
        where = Path(root or usual)
        return [DataInfo(name="mnist", description="", where=where if where.exists() else None, how="")]

    monkeypatch.setattr("thinwire_lab.studies.compare.datasets", here)
    monkeypatch.setattr("thinwire_lab.studies.compare.check", lambda jobs: [*jobs])
    monkeypatch.chdir(tmp_path)
    made: list[Job] = []
    asked = replace(TWO, models=["mlp"], data="mnist[train=4000]")
    roots = (None, "other", str(other), str(usual), "usual/../usual/mnist", "nowhere")
    new = []
    for root in roots:
        before = len(made)
        results = compare(replace(asked, data_root=root), tmp_path / "out", noting(made))
        new.append(len(made) - before)
    assert new == [8, 8, 0, 0, 0, 8]
    assert f"<td>mnist[train=4000] in {other}</td>" in page(results) and "<td>mnist[train=4000]</td>" in page(results)


def test_runs_on_another_text_are_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Job] = []
    path = tmp_path / "results.json"
    asked = Comparison(
        designs=["fp32"], links=["none"], models=["byte-transformer"], data="python-text[train=100]", steps=9
    )

    def runs() -> int:
        before = len(made)
        assert page(compare(asked, tmp_path, noting(made)))
        return len(made) - before

    def without_digests(python: str) -> None:
        kept = json.loads(path.read_text())
        for run in kept["runs"]:
            run["job"].pop("data_digest", None)
            run["machine"]["python"] = python
        path.write_text(json.dumps(kept))

    assert (runs(), runs()) == (1, 0)
    without_digests(platform.python_version())
    assert runs() == 0, "nothing tells that it was another text"
    without_digests("3.0.1")
    assert runs() == 1, "another Python had another library"
    monkeypatch.setattr(Dataset, "digest", lambda self: "of another text")
    assert runs() == 1
    assert "python-text[train=100], digest of another text" in page(compare(asked, tmp_path, noting(made)))


def test_stored_runs_that_lack_fields_are_shown(tmp_path: Path) -> None:
    compare(TWO, tmp_path, told)
    path = tmp_path / "results.json"
    kept = json.loads(path.read_text())
    for run in kept["runs"]:
        run["job"] = {"design": run["job"]["design"], "lr": None}
    path.write_text(json.dumps(kept))
    text = page(compare(TWO, tmp_path, told))
    lines = [line for line in text.splitlines() if "<td>digits</td><td>" in line]
    assert any("<td>0</td><td>4</td><td>1 of their own</td><td>400</td><td>–</td><td>–</td>" in line for line in lines)


def test_seconds_of_different_machines_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(replace(TWO, designs=["fp32"]), tmp_path, told)
    path = tmp_path / "results.json"
    kept = json.loads(path.read_text())
    for run in kept["runs"]:
        run["machine"]["processor"] = "a slower one"
    path.write_text(json.dumps(kept))
    results = compare(replace(TWO, designs=["fp32"]), tmp_path, told)
    assert results.notes == [], "all are of one machine"
    results = compare(TWO, tmp_path, told)
    [note] = results.notes
    assert "timed on different machines: a slower one, " in note and note in page(results)
    results = compare(replace(TWO, designs=["3lc[s=1.75,entropy=zstd]"]), tmp_path, told)
    assert results.notes == [], "what is not shown is not compared"


def test_a_run_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
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


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*Choose another place"):
        write_page(tmp_path / "file" / "report.html", page(compare(TWO, tmp_path / "fine", told)))


# ---- what it comes to


def test_means_deviations_and_extrapolated_times(tmp_path: Path) -> None:
    rows = compare(TWO, tmp_path, told).rows
    assert [(row.design[:4], row.link) for row in rows] == [
        ("fp32", "1mbit"),
        ("fp32", "none"),
        ("3lc[", "1mbit"),
        ("3lc[", "none"),
    ]
    thin = rows[2]
    assert thin.test_accuracy == pytest.approx(0.81) and thin.test_accuracy_std == pytest.approx(0.02 / 2**0.5)
    assert thin.accuracy_difference == pytest.approx(-0.1)
    assert thin.accuracy_difference_std == pytest.approx(0, abs=1e-12), "the seeds' own differences cancel in pairs"
    assert thin.speedup == pytest.approx(4) and thin.timed_steps == 100
    assert thin.training_seconds == pytest.approx(399 * 0.1)
    assert rows[3].seconds_per_step == 0.01 and rows[3].timed_steps == 400


def test_what_was_not_measured_is_none() -> None:
    rows = tabulate(TWO.cells(), lambda job: None)
    assert [row.runs for row in rows] == [0] * 4
    assert all(row.seconds_per_step is None and row.test_accuracy is None for row in rows)


def test_the_page(tmp_path: Path) -> None:
    results = compare(TWO, tmp_path, told)
    text = page(results)
    assert "91.00 ± 1.41" in text and "-10.00 ± 0.00" in text and "0.1000 ± 0.0000 s, 4.0×" in text
    assert "3lc[s=1.75,entropy=zstd]" in text and "seeds 0, 1." in text and text.count("<img") == 1
    assert "http" not in text, "it needs nothing else"
    assert "Nothing has been measured yet" in page(
        replace(results, runs=[], rows=tabulate(TWO.cells(), lambda job: None))
    )


def test_a_run_in_one_process_is_made_again_where_its_seconds_are_wanted(tmp_path: Path) -> None:
    made: list[Job] = []
    inside = replace(TWO, in_process=True)

    def train(job: Job) -> RunOutcome:
        return msgspec.structs.replace(noting(made)(job), in_process=True if job.link is None else UNSET)

    rows = compare(inside, tmp_path, train).rows
    assert [row.timed_runs for row in rows if row.link == "none"] == [0, 0]
    assert all(row.test_accuracy for row in rows)
    count = len(made)
    assert compare(inside, tmp_path, train).rows == rows and len(made) == count
    on_a_link = replace(TWO, links=["1mbit"])
    compare(on_a_link, tmp_path, noting(made))
    assert len(made) == count, "accuracies are there, and the link's seconds"
    rows = compare(TWO, tmp_path, noting(made)).rows
    assert all(job.link is None for job in made[count:]) and len(made) == count + 4
    assert [row.timed_runs for row in rows] == [2] * 4
