"""Races to an accuracy and to a loss: stopped runs, learning rates, and tables. Ranks are scripts."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench import race
from thinwire_lab.bench.cells import HookCell, HookRank, rank_command
from thinwire_lab.bench.hook_runs import HookRun, measure
from thinwire_lab.bench.options import RUNNERS
from thinwire_lab.bench.race import Race
from thinwire_lab.bench.standings import median_curve, reached
from thinwire_lab.jobs import grid
from thinwire_lab.jobs.outcome import CurvePoint
from thinwire_lab.jobs.results import Results

# A rank that trains at its hook's pace, on a clock of its own. Its accuracy is a fiftieth of its steps; its loss falls
# by 0.1 at each evaluation from twice its pace, more where the rate is not .004.
SCRIPT = """
import json, pathlib, sys, time
role = json.loads(sys.argv[1])
cell, rank, gate = role["cell"], role["rank"], pathlib.Path(role["gate"])
pace = json.loads(PACES)[cell["hook"]]
first = abs(pace) + (0 if cell["lr"] == 0.004 else 0.5) + cell["seed"] / 100
seconds = abs(pace) * (1 + cell["seed"])
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
        say("stepped", step=step, seconds=step * seconds)
        if cell["eval_every"] and step % cell["eval_every"] == 0:
            loss = first - 0.1 * step / cell["eval_every"]
            say("scored", step=step, seconds=step * seconds, accuracy=step / 50, loss=loss)
    if pace < 0 and rank == 0 and step == 15:
        sys.exit("NonFiniteError: holds NaN")
say("stopped")
wait("stopped")
say("ended", cpu_seconds=1.0, cpu_seconds_alone=0.01, weights="same", report="")
"""
IMAGES = {"models": ["mlp"], "data": "digits", "links": ["none"], "steps": 40, "eval_every": 10, "give_up": 2.0}
TEXT = {"models": ["byte-transformer-1m"], "links": ["10mbit"], "steps": 8, "eval_every": 2, "rates": (0.002, 0.004)}

Runs = dict[HookCell, HookRun]


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(paces: dict[str, float], file: Path | None = None, **options: Any) -> tuple[Race, Runs, list[HookCell]]:
        script, ran = SCRIPT.replace("PACES", repr(json.dumps(paces))), list[HookCell]()

        def command(role: HookRank) -> list[str]:
            return [sys.executable, "-c", script, rank_command(role)[-2]]

        def measured_by(cell: HookCell, *, counted: bool = False, **more: Any) -> HookRun:
            ran.append(cell)
            return measure(replace(cell, link=None), command=command, **more)

        monkeypatch.setattr(race, "measure", measured_by)
        bench = Race(**{"hooks": list(paces), "ranks": 2, **options})
        measured: Runs = {}
        grid.run(bench, Results(file, bench.kinds), measured)
        return bench, measured, ran

    return run


def test_race_stops_slow_hooks(raced: Any) -> None:
    _, measured, _ = raced({"3lc": 2.0, "fp16": 30.0, "powersgd-1": 1.0, "bf16": 2.5}, **IMAGES)
    runs = list(measured.values())
    assert [run.ended for run in runs] == ["target", "limit", "target", "limit"]
    assert [run.seconds_to_target for run in runs] == [80.0, None, 40.0, None]
    # Stopped at the first step past 2 × 80 s, with fp16's 30 s a step; and past 2 × 40 s with bf16's 2.5 s.
    assert [runs[1].seconds, runs[3].seconds] == [180.0, 82.5]


def test_race_compares_within_seeds_and_keeps_failed_runs(raced: Any) -> None:
    bench, measured, _ = raced({"3lc": 1.0, "onebit": 0.0, "fp16": 1.5, "topk": -1.0}, **IMAGES | {"seeds": 2})
    assert [run.ended for run in measured.values()] == ["target", "error", "target", "error"] * 2
    ours, crashed, stock, stumbling = bench.standings(measured)
    assert ours.seconds == {0: 40.0, 1: 80.0} and ours.seconds_to_target == 60.0 and ours.steps_to_target == 40
    assert ours.of_best == pytest.approx(60 / 90) and stock.of_best == 1.0
    assert crashed.seconds_to_target is None and set(crashed.ended.values()) == {"error"}
    assert stumbling.seconds == {0: 15.0, 1: 30.0} and [len(curve) for curve in stumbling.curves] == [1, 1]
    assert bench.sections(measured)["standings"][0] == ours
    [table] = bench.tables(measured)
    assert table.title == "mlp, 2 ranks, unlimited: to 80.0%" and table.lines[1][2] == "failed, failed"
    assert bench.notes(measured)[-1].endswith("failed: NonFiniteError: holds NaN")


def test_race_to_loss_uses_best_learning_rates_and_whole_periods(raced: Any) -> None:
    paces = {"none": 2.0, "local-sgd[h=4]": 2.1, "diloco[h=30,codec=fp32]": 2.15}
    bench, measured, ran = raced(paces, **TEXT | {"seeds": 2})
    grid, edge = [(0.002, 0, None), (0.004, 0, None)], [(0.008, 0, None)]
    others = [(0.004, 1, None), (0.004, 0, "10mbit")]
    assert [(cell.lr, cell.seed, cell.link) for cell in ran] == grid * 3 + edge * 3 + others * 3
    timed = {cell.hook: (cell.warmup, cell.steps, cell.eval_every) for cell in ran if cell.link}
    assert timed == {"none": (3, 40, 0), "local-sgd[h=4]": (4, 40, 0), "diloco[h=30,codec=fp32]": (30, 60, 0)}
    plain, local, uncoded = bench.standings(measured)
    assert plain.rate == 0.004 and plain.scores == pytest.approx({0: 1.6, 1: 1.61})
    assert plain.beside_plain == 0 and local.beside_plain == pytest.approx(0.1)
    # To 1.705: `none` passes it at step 6; the last method never does.
    assert plain.steps_to_target == pytest.approx(6) and local.steps_to_target == pytest.approx(8)
    assert uncoded.steps_to_target is None and uncoded.seconds_to_target is None
    assert local.seconds_per_step == pytest.approx(2.1) and local.seconds_to_target == pytest.approx(16.8)
    assert local.of_best == pytest.approx(16.8 / 12)
    [table] = bench.tables(measured)
    assert table.title == "byte-transformer-1m, 2 ranks, 10mbit: to the loss of none + 0.1"
    assert table.lines[1][:6] == ["local-sgd[h=4]", "0.004", "1.700, 1.710", "1.705", "+0.100", "8"]
    chart = bench.chart(measured)
    assert chart is not None and [len(panel.series) for panel in chart.panels] == [3]


def test_race_to_loss_keeps_diverging_methods_without_times(raced: Any) -> None:
    bench, measured, ran = raced({"none": 2.0, "3lc[s=1.0]": -9.4}, **TEXT | {"rates": (0.004,), "steps": 16})
    assert [cell.hook for cell in ran] == ["none", "3lc[s=1.0]", "none"]
    lost = bench.standings(measured)[1]
    assert (lost.rate, lost.scores, lost.score) == (None, {}, None)
    assert bench.tables(measured)[0].lines[1][:4] == ["3lc[s=1.0]", "–", "failed", "–"]
    [diverged] = [run for cell, run in measured.items() if cell.hook != "none" and cell.lr]
    assert not bench.failed(diverged), "at this rate it diverges, and would again"


def full_run(*points: tuple[int, float, float], loss: float | None, error: str | None = None) -> HookRun:
    """A full run; its curve is step, bytes and loss."""
    curve = [CurvePoint(step=step, seconds=0.0, accuracy=0.0, sent_bytes=sent, loss=at) for step, sent, at in points]
    return HookRun(curve=curve, steps_done=9, seconds=1.0, ended="steps", test_loss=loss, lr=0.1, error=error)


def test_steps_and_bytes_to_the_target_are_interpolated() -> None:
    points = [(0, 0.0, 4.0), (50, 4000.0, 3.0), (100, 5000.0, 2.0)]
    assert reached(2.5, list(points)) == (75, 4500.0) and reached(9.0, list(points)) == (0, 0.0)
    assert reached(1.0, list(points)) is None


def test_failed_seed_has_an_infinite_loss() -> None:
    runs = [full_run((50, 1.0, 3.0 + at), (100, 2.0, 2.0 + at), loss=2.0 + at) for at in range(2)]
    diverged = full_run((50, 1.0, 1.0), loss=None, error="NonFiniteError: w")
    assert median_curve([*runs, diverged]) == [(50, 1.0, 4.0), (100, 2.0, 3.0)], "the median of 3, 4 and inf"
    nan = full_run((50, 1.0, math.nan), (100, 2.0, 1.0), loss=1.0)
    assert median_curve([*runs, nan]) == [(50, 1.0, 4.0), (100, 2.0, 2.0)]


def test_race_impossible_options_raise_config_error() -> None:
    text: dict[str, Any] = {"models": ["byte-transformer-1m"]}
    for options, said in (
        ({"models": ["lenet", "byte-transformer"]}, "separately"),
        ({"give_up": 0.5}, r"give_up=0\.5"),
        ({"hooks": ["zip"]}, "'zip'"),
        (text | {"rates": (0.1,), "lr": 0.2}, "--lr"),
        (text | {"data": "fashion-mnist"}, "python-text"),
        (text | {"hooks": ["3lc[s=1.75,start_step=50]"]}, "start_step=50"),
    ):
        with pytest.raises(ConfigError, match=said):
            Race(**options)
    assert Race(**text, hooks=["powersgd-1", "3lc[start_step=3]"]).cells(), "these steps are of the warm-up"
    late = Race(hooks=["3lc[start_step=25]", "local-sgd[h=4]"], links=["none"], steps=10)
    assert [(cell.warmup, cell.steps) for cell in late.cells()] == [(3, 10)] * 2, "uncompressed steps are on the clock"
    assert {"fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4"} <= set(RUNNERS)
