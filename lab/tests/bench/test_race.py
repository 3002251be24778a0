"""The race: who is stopped, who wins, and what a table of seeds says. Ranks are scripts that report what we want."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench import harness, race
from thinwire_lab.bench.hook_cells import HookCell, HookRank
from thinwire_lab.bench.hook_runs import HookRun, measure
from thinwire_lab.bench.options import RUNNERS
from thinwire_lab.bench.race import RaceBench, standings
from thinwire_lab.jobs.outcome import CurvePoint
from thinwire_lab.jobs.results import Results

# A rank that trains at its hook's pace, on a clock of its own, and is 20 % better after each evaluation.
SCRIPT = """
import json, pathlib, sys, time
role = json.loads(sys.argv[1])
cell, rank, gate = role["cell"], role["rank"], pathlib.Path(role["gate"])
pace = json.loads(PACES)[cell["hook"]] * (1 + cell["seed"])
stumbles = pace < 0
pace = abs(pace)
if pace == 0:
    sys.exit("out of breath")

def say(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)

def wait(name):
    while not (gate / name).exists():
        time.sleep(0.01)

say("warm")
wait("warm")
for step in range(1, cell["steps"] + 1):
    if rank == 0:
        say("stepped", step=step, seconds=step * pace)
        if step % cell["eval_every"] == 0:
            say("scored", step=step, seconds=step * pace, accuracy=step / 50)
    if stumbles and rank == 0 and step == 15:
        sys.exit("holds NaN")
say("stopped")
wait("stopped")
say("ended", cpu_seconds=1.0, cpu_seconds_alone=0.01, weights="same", report="")
"""

Runs = dict[HookCell, list[HookRun]]


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(paces: dict[str, float], **options: Any) -> tuple[RaceBench, Runs]:
        script = SCRIPT.replace("PACES", repr(json.dumps(paces)))

        def command(role: HookRank) -> list[str]:
            return [sys.executable, "-c", script, role.command()[-1]]

        monkeypatch.setattr(race, "measure", lambda cell, **more: measure(cell, command=command, **more))
        given = {"models": ["mlp"], "data": "digits", "links": ["none"], "ranks": 2, "steps": 40, "eval_every": 10}
        bench = RaceBench(hooks=list(paces), **{**given, "give_up": 2.0, **options})
        measured: Runs = {}
        harness.run(bench, Results(None, bench.kinds), measured)
        return bench, measured

    return run


def test_who_is_slower_than_the_limit_is_stopped_and_the_best_time_counts(raced: Any) -> None:
    _, measured = raced({"3lc": 2.0, "fp16": 30.0, "powersgd-1": 1.0, "bf16": 2.5})
    runs = [run for [run] in measured.values()]
    assert [run.ended for run in runs] == ["target", "limit", "target", "limit"]
    assert [run.seconds_to_target for run in runs] == [80.0, None, 40.0, None]
    # Stopped at the first step past 2 × 80 s, with fp16's 30 s a step; and past 2 × 40 s with bf16's 2.5 s.
    assert [runs[1].seconds, runs[3].seconds] == [180.0, 82.5]
    assert [point.step for point in runs[3].curve] == [10, 20, 30]


def test_every_seed_is_a_race_of_its_own_and_a_crash_is_a_row(raced: Any) -> None:
    bench, measured = raced({"3lc": 1.0, "onebit": 0.0, "fp16": 1.5, "topk": -1.0}, seeds=2, give_up=3.0)
    assert [run.ended for [run] in measured.values()] == ["target", "error", "target", "error"] * 2
    assert [cell.seed for cell in measured] == [0] * 4 + [1] * 4
    ours, crashed, stock, stumbling = standings(measured)
    assert ours.seconds == {0: 40.0, 1: 80.0} and ours.median_seconds == 60.0
    assert ours.steps == {0: 40, 1: 40}
    assert ours.of_best_stock == pytest.approx(60 / 90) and stock.of_best_stock == 1.0
    assert crashed.median_seconds is None and crashed.of_best_stock is None
    assert set(crashed.ended.values()) == {"error"}
    [first, _] = [run for cell, [run] in measured.items() if cell.hook == "topk"]
    assert [point.accuracy for point in first.curve] == [0.2], "who stumbles keeps what it got to"
    assert (first.steps_done, first.seconds) == (15, 15.0) and "holds NaN" in (first.error or "")
    assert stumbling.trained_seconds == {0: 15.0, 1: 30.0}
    sections = bench.sections(measured)
    assert len(sections["rows"]) == 8 and sections["standings"][0] == ours
    assert bench.notes(measured)[-1].endswith("failed: holds NaN")


def test_a_target_that_is_out_of_reach_stops_nobody(raced: Any) -> None:
    _, measured = raced({"3lc": 1.0, "fp16": 9.0}, steps=20)
    assert [(run.ended, run.steps_done) for [run] in measured.values()] == [("steps", 20)] * 2
    assert standings(measured)[0].median_seconds is None


def run_of(bench: RaceBench, hook: str, seed: int, ended: str, seconds: float) -> tuple[HookCell, list[HookRun]]:
    reached = ended == "target"
    curve = [CurvePoint(step=50, seconds=seconds, accuracy=0.81 if reached else 0.4)]
    run = HookRun(
        curve=curve,
        steps_done=50,
        seconds=seconds,
        ended=ended,
        seconds_to_target=seconds if reached else None,
        error="EngineError: rank 1 died" if ended == "error" else None,
    )
    return bench.cell("lenet", "10mbit", seed, hook), [run]


def test_a_row_says_how_each_seed_ended() -> None:
    bench = RaceBench(models=["lenet"])
    runs = [
        run_of(bench, "fp16", 0, "target", 20.0),
        run_of(bench, "3lc[s=1.0]", 0, "target", 8.0),
        run_of(bench, "3lc[s=1.0]", 1, "limit", 30.0),
        run_of(bench, "onebit", 0, "error", 0.0),
        run_of(bench, "topk", 0, "steps", 40.0),
    ]
    [table] = bench.tables(dict(runs))
    assert table.title == "lenet on fashion-mnist, 4 ranks, 10mbit: 80.0%"
    assert table.lines == [
        ["fp16", "20.0", "50", "20.0", "1.00"],
        ["3lc[s=1.0]", "8.0, > 30.0 (stopped at 3×)", "50, –", "", ""],
        ["onebit", "failed", "–", "", ""],
        ["topk", "> 40.0 (not reached)", "–", "", ""],
    ]
    lines = [bench.line(cell, run) for cell, [run] in runs]
    assert lines[0] == "lenet, 10mbit, seed 0, fp16: target after 20.0 s and 50 steps"
    assert lines[2].endswith("stopped after 30.0 s, more than 3× the best")
    assert lines[3].endswith("failed after 50 steps: EngineError: rank 1 died")
    chart = bench.chart(dict(runs))
    assert chart is not None
    assert chart.labels() == ["fp16", "3lc[s=1.0]", "onebit", "topk", "the target, 80.0%"]
    [panel] = chart.panels
    assert len(panel.series) == 6, "a curve for each seed"


def test_the_median_stands_where_more_than_half_reached_the_target() -> None:
    bench = RaceBench(models=["lenet"])
    late, ours = "powersgd-1[start_step=9]", "3lc[s=1.75,start_step=9]"
    given = {late: (8.0, None, 10.0), ours: (None, 5.0, None), "bf16": (20.0, 20.0, 20.0)}
    runs = [
        run_of(bench, hook, seed, "target" if seconds else "limit", seconds or 30.0)
        for hook, times in given.items()
        for seed, seconds in enumerate(times)
    ]
    rows = standings(dict(runs))
    assert [row.median_seconds for row in rows] == [10.0, None, 20.0]
    assert [row.of_best_stock for row in rows] == [1.0, None, 2.0], "a stock hook that begins late is stock"


def test_steps_that_a_method_does_not_compress_are_on_the_clock() -> None:
    bench = RaceBench(models=["lenet"], hooks=["3lc[start_step=25]", "local-sgd[h=4]"], links=["none"], steps=10)
    assert [(cell.warmup, cell.steps) for cell in bench.cells()] == [(3, 10)] * 2


def test_a_race_that_cannot_be_is_refused_before_it_starts() -> None:
    for options, text in (
        ({"hooks": []}, "nothing to measure"),
        ({"give_up": 0.5}, "give_up=0.5"),
        ({"give_up": float("nan")}, "give_up=nan"),
        ({"hooks": ["zip"]}, "unknown hook 'zip'"),
    ):
        with pytest.raises(ConfigError, match=text):
            RaceBench(**options)
    assert {"fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4"} <= set(RUNNERS)
