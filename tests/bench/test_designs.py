"""Every design on every model: one cluster takes several trainings in turn, and tells of each."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.bench import designs as module
from thinwire.bench.designs import jobs, run_model, run_trainings
from thinwire.errors import ConfigError, ProtocolError
from thinwire.jobs.job import Job


def test_processes_train_with_one_design_after_the_other() -> None:
    heard: list[str] = []
    todo = jobs(["mlp"], ["fp32", "3lc[s=1.75]", "local2"], data="digits", steps=5, workers=2)
    rows = run_model(todo, servers=2, on_row=lambda row: heard.append(row["design"]))
    assert heard == [row["design"] for row in rows] == ["fp32", "3lc[s=1.75]", "local2"]
    for row in rows:
        assert row["finished"] and row["finite"] and row["equal"] and row["steps"] == 5 and row["error"] == ""
    assert len({row["loss"] for row in rows}) == 3


def test_a_training_that_fails_is_told_and_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, list[str]]] = []

    def run_worker(job: Job, *, servers: list[str], **options: Any) -> dict[str, Any]:
        begun.append((job.design, servers))
        if job.design == "int8":
            raise ProtocolError("no luck today")
        return {"steps": 3, "train_loss": 0.5, "weights": "abc", "test_accuracy": 0.9}

    monkeypatch.setattr("thinwire.bench.designs.run_worker", run_worker)
    reports: list[dict[str, Any]] = []
    todo = jobs(["mlp"], ["int8", "fp32"], data="digits", steps=3, workers=2)
    run_trainings(todo, rank=1, shards=["a:1,a:2", "b:1,b:2"], report=reports.append)
    assert begun == [("int8", ["grpc://a:1", "grpc://b:1"]), ("fp32", ["grpc://a:2", "grpc://b:2"])]
    assert [report["event"] for report in reports] == ["trained", "trained", "done"]
    assert reports[0]["error"] == "ProtocolError: no luck today"
    assert (reports[1]["error"], reports[1]["steps"], reports[1]["weights"]) == (None, 3, "abc")


def row_of(*reports: dict[str, Any], design: str = "fp32") -> dict[str, Any]:
    [job] = jobs(["mlp"], [design], data="digits", steps=5, workers=2)
    full = [{"rank": rank, "error": None, "steps": 5, "train_loss": 1.0, "weights": "a"} for rank in (0, 1)]
    return module._row(job, [{**one, **other} for one, other in zip(full, reports, strict=True)])


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ({}, "equal", True),
        ({"weights": "b"}, "equal", False),
        ({"train_loss": float("nan")}, "finite", False),
        ({"error": "EngineError: gone"}, "finished", False),
        ({"error": "EngineError: gone"}, "error", "worker 1: EngineError: gone"),
        ({"steps": 4}, "steps", 4),
    ],
)
def test_a_row_says_what_was_wrong(change: dict[str, Any], key: str, value: object) -> None:
    assert row_of({}, change)[key] == value


def test_a_pair_that_cannot_be_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="unknown model 'mlq'"):
        jobs(["mlp", "mlq"], ["fp32"], data="digits", steps=5, workers=2)
    [job] = jobs(["byte-transformer"], ["fp32"], data="digits", steps=5, workers=2)
    assert job.data == "python-text", "which has no images"
