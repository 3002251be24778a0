"""Every design on every model: what is wrong with a pair is said, and the next one begins."""

from __future__ import annotations

import math

import pytest

from tests.jobs.outcomes import run_outcome
from thinwire.bench import harness
from thinwire.bench.designs import DesignsBench, Trained
from thinwire.errors import ConfigError, EngineError
from thinwire.jobs import in_process
from thinwire.jobs.job import Job
from thinwire.jobs.outcome import RunOutcome
from thinwire.jobs.results import Results

Measured = dict[Job, list[Trained]]


def measured_by(bench: DesignsBench) -> Measured:
    measured: Measured = {}
    harness.run(bench, Results(None, bench.kinds), measured)
    return measured


def test_designs_train_one_after_the_other() -> None:
    bench = DesignsBench(designs=["fp32", "3lc[s=1.75]", "local2"], models=["mlp"], steps=5, workers=2)
    measured = measured_by(bench)
    assert [job.design for job in measured] == ["fp32", "3lc[s=1.75]", "local2"]
    runs = [run for [run] in measured.values()]
    assert not any(run.error for run in runs) and len({run.loss for run in runs}) == 3
    [table] = bench.tables(measured)
    assert table.header == ["design", "mlp"] and table.lines[0] == ["fp32", f"{runs[0].loss:.3f}"]


def test_what_was_wrong_is_said_and_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: Job) -> RunOutcome:
        if job.design == "int8":
            raise EngineError("the workers ended with 2 different models")
        return run_outcome(train_loss=math.nan if job.design == "mqe1" else 0.5)

    monkeypatch.setattr(in_process, "run", run)
    bench = DesignsBench(designs=["int8", "mqe1", "fp32"], models=["mlp"])
    measured = measured_by(bench)
    errors = [run.error for [run] in measured.values()]
    assert errors == ["EngineError: the workers ended with 2 different models", "loss nan", ""]
    assert [bench.failed(run) for [run] in measured.values()] == [True, True, False]
    assert [line[1] for line in bench.tables(measured)[0].lines] == ["FAILED", "FAILED", "0.500"]
    assert bench.line(*next((job, run) for job, [run] in measured.items())).startswith("mlp, int8: EngineError")


def test_a_pair_that_cannot_be_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="unknown model 'mlq'"):
        DesignsBench(models=["mlp", "mlq"], designs=["fp32"])
    [job] = DesignsBench(models=["byte-transformer"], designs=["fp32"]).cells()
    assert job.data == "python-text", "which has no images"
    assert len(DesignsBench().cells()) > 100, "all pairs"
