"""The race to a loss: rates from the grid, whole periods on links, and what the tables say. Ranks are scripts."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench import harness, loss_race
from thinwire_lab.bench.hook_cells import HookCell, HookRank
from thinwire_lab.bench.hook_runs import HookRun, measure
from thinwire_lab.bench.loss_race import LossRace
from thinwire_lab.bench.loss_standings import standings
from thinwire_lab.jobs.outcome import CurvePoint
from thinwire_lab.jobs.results import Results

# A rank whose loss falls by 0.1 at each evaluation from what its method, rate and seed begin with.
SCRIPT = """
import json, pathlib, sys, time
role = json.loads(sys.argv[1])
cell, rank, gate = role["cell"], role["rank"], pathlib.Path(role["gate"])
first = json.loads(FIRST)[cell["hook"]] + (0 if cell["lr"] == 0.004 else 0.5) + cell["seed"] / 100

def say(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)

def wait(name):
    while not (gate / name).exists():
        time.sleep(0.01)

say("warm")
wait("warm")
if first > 9:
    sys.exit("NonFiniteError: diverged")
for step in range(1, cell["steps"] + 1):
    if rank == 0:
        say("stepped", step=step, seconds=2.0 * step)
        if cell["eval_every"] and step % cell["eval_every"] == 0:
            loss = first - 0.1 * step / cell["eval_every"]
            say("scored", step=step, seconds=2.0 * step, accuracy=0.5, loss=loss)
say("stopped")
wait("stopped")
say("ended", cpu_seconds=1.0, cpu_seconds_alone=0.01, weights="same", report="")
"""
FIRST = {"none": 2.0, "local-sgd[h=4]": 2.1, "diloco[h=30,codec=fp32]": 2.15}


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(first: dict[str, float], file: Path | None = None, **options: Any) -> tuple[LossRace, Any, list[HookCell]]:
        script, ran = SCRIPT.replace("FIRST", repr(json.dumps(first))), []

        def command(role: HookRank) -> list[str]:
            return [sys.executable, "-c", script, role.command()[-1]]

        def measured_by(cell: HookCell, *, counted: bool, **more: Any) -> HookRun:
            ran.append(cell)
            assert counted
            return measure(replace(cell, link=None), command=command, **more)

        monkeypatch.setattr(loss_race, "measure", measured_by)
        given = {"links": ["10mbit"], "ranks": 2, "steps": 8, "eval_every": 2, "rates": (0.002, 0.004), "seeds": 2}
        race = LossRace(hooks=list(first), **{**given, **options})
        measured: dict[HookCell, list[HookRun]] = {}
        harness.run(race, Results(file, race.kinds), measured)
        return race, measured, ran

    return run


def test_each_method_runs_at_its_best_rate_and_for_whole_periods_on_links(raced: Any) -> None:
    race, measured, ran = raced(FIRST)
    assert [(cell.lr, cell.seed, cell.link) for cell in ran] == [
        (0.002, 0, None),
        (0.004, 0, None),
        (0.004, 1, None),
        (0.004, 0, "10mbit"),
    ] * 3
    timed = {cell.hook: (cell.warmup, cell.steps, cell.eval_every) for cell in ran if cell.link}
    assert timed == {"none": (3, 40, 0), "local-sgd[h=4]": (4, 40, 0), "diloco[h=30,codec=fp32]": (30, 60, 0)}
    plain, local, uncoded = standings(measured, race.margin)
    assert plain.rate == 0.004 and plain.losses == pytest.approx({0: 1.6, 1: 1.61})
    assert plain.rates == pytest.approx({0.002: 2.1, 0.004: 1.6})
    assert plain.above_plain == 0 and local.above_plain == pytest.approx(0.1)
    assert [step for step, _, _ in local.curve] == [2, 4, 6, 8] and local.curve[-1][2] == pytest.approx(1.705)
    # To 1.705: `none` passes it 95 hundredths of the way from step 4 to step 6; the last never does.
    assert plain.steps_to_target == pytest.approx(6) and local.steps_to_target == pytest.approx(8)
    assert uncoded.steps_to_target is None and uncoded.seconds_to_target == {"10mbit": None}
    assert local.seconds_per_step == {"10mbit": 2.0} and local.seconds_to_target == {"10mbit": pytest.approx(16)}
    assert local.of_best_other == {"10mbit": pytest.approx(8 / 6)}
    losses, times = race.tables(measured)
    assert losses.title == "byte-transformer-1m, 2 ranks, 8 steps"
    assert losses.lines[1][:5] == ["local-sgd[h=4]", "0.004", "1.700, 1.710", "1.705", "+0.100"]
    assert times.header[-1] == "10mbit: s a step, computing, s, of best other"
    assert times.lines[1][-1] == "2.000, –, 16, 1.33" and times.lines[2][-1] == "2.000, –, –, –"
    chart = race.chart(measured)
    assert chart is not None
    by_link = [panel for panel in chart.panels if panel.x_label == "seconds at 10mbit"]
    assert len(by_link) == 1 and len(by_link[0].series) == 4, "three methods and the frontier"


def test_what_diverges_is_a_row_and_the_file_goes_on(raced: Any, tmp_path: Path) -> None:
    file = tmp_path / "race.json"
    first = {"none": 2.0, "3lc[s=1.0]": 9.4}
    race, measured, ran = raced(first, file, seeds=1, rates=(0.004,))
    assert [cell.hook for cell in ran] == ["none", "none", "3lc[s=1.0]"], "nothing to time without a loss"
    race, measured, ran = raced(first | {"3lc[s=1.0]": 9.1}, file, seeds=1, rates=(0.002, 0.004))
    assert [(cell.hook, cell.lr) for cell in ran] == [("none", 0.002), ("3lc[s=1.0]", 0.002)]
    _, lost = standings(measured, race.margin)
    assert (lost.rate, lost.losses, lost.median_loss) == (None, {}, None)
    assert race.tables(measured)[0].lines[1][:4] == ["3lc[s=1.0]", "–", "failed", "–"]
    lines = [race.line(cell, run) for cell, [run] in measured.items()]
    assert lines[0].startswith("byte-transformer-1m, unlimited, seed 0, none, rate 0.002: 2.100 nats a byte")
    assert any("failed: NonFiniteError: diverged" in line for line in lines)
    written = json.loads(file.read_text())
    assert written["standings"][0]["method"] == "none" and written["rows"][0]["test_loss"] == pytest.approx(2.1)


def test_runs_at_the_best_rate_are_made_again_where_a_better_one_is_found(raced: Any, tmp_path: Path) -> None:
    file, first = tmp_path / "race.json", {"none": 2.0}
    _, _, ran = raced(first, file, rates=(0.002,))
    assert [(cell.lr, cell.seed, cell.link) for cell in ran] == [
        (0.002, 0, None),
        (0.002, 1, None),
        (0.002, 0, "10mbit"),
    ]
    race, measured, ran = raced(first, file, rates=(0.002, 0.004))
    assert [(cell.lr, cell.seed, cell.link) for cell in ran] == [
        (0.004, 0, None),
        (0.004, 1, None),
        (0.004, 0, "10mbit"),
    ]
    [row] = standings(measured, race.margin)
    assert row.rate == 0.004 and list(row.losses) == [0, 1]
    _, _, ran = raced(first, file, rates=(0.002, 0.004, 0.008))
    assert [cell.lr for cell in ran] == [0.008], "no better, so the others stand"


def test_a_stored_run_that_ended_within_a_period_is_made_again() -> None:
    race = LossRace(hooks=["local-sgd[h=4]"], rates=(0.1,), seeds=1, links=["10mbit"])
    grid, timed = race.cells()
    before = {grid: [HookRun(curve=[], steps_done=8, seconds=1.0, ended="steps", test_loss=2.0)]}
    for steps, ended, again in ((6, "limit", True), (8, "limit", False), (0, "error", False)):
        run = HookRun(curve=[], steps_done=steps, seconds=1.0, ended=ended, lr=0.1)
        assert race.outdated(timed, run, before) == again, (steps, ended)


def run_of(*points: tuple[int, float, float], loss: float | None, error: str | None = None) -> list[HookRun]:
    """A full run; its curve is step, bytes and loss."""
    curve = [CurvePoint(step=step, seconds=0.0, accuracy=0.0, sent_bytes=sent, loss=at) for step, sent, at in points]
    return [
        HookRun(
            curve=curve,
            steps_done=100,
            seconds=1.0,
            ended="steps",
            test_loss=loss,
            sent_bytes_per_step=50.0,
            lr=0.1,
            error=error,
        )
    ]


def test_bytes_to_the_target_are_what_was_counted_until_then() -> None:
    """Not so many times the mean: a controller, or a beginning, sends more in some steps than in others."""
    race = LossRace(hooks=["none"], rates=(0.1,), seeds=1, links=["10mbit"])
    [cell] = (cell for cell in race.cells() if cell.lr)
    curve = [(0, 0.0, 4.0), (50, 4000.0, 3.0), (100, 5000.0, 2.0)]
    [row] = standings({cell: run_of(*curve, loss=2.0)}, margin=0.5)
    assert row.steps_to_target == 75 and row.bytes_to_target == 4500.0
    [at_once] = standings({cell: run_of(*curve, loss=2.0)}, margin=5.0)
    assert at_once.steps_to_target == 0 and at_once.bytes_to_target == 0


def test_a_seed_that_failed_has_an_infinite_loss_all_along() -> None:
    race = LossRace(hooks=["none"], rates=(0.1,), seeds=3, links=["10mbit"])
    full = [cell for cell in race.cells() if cell.lr or cell.seed]
    curves = [run_of((50, 1.0, 3.0 + at), (100, 2.0, 2.0 + at), loss=2.0 + at) for at in range(2)]
    diverged = run_of((50, 1.0, 1.0), loss=None, error="NonFiniteError: w")
    [row] = standings(dict(zip(full, [*curves, diverged], strict=True)), margin=0.5)
    assert row.median_loss == 3.0 and row.curve == [(50, 1.0, 4.0), (100, 2.0, 3.0)], "the median of 3, 4 and inf"
    nan = run_of((50, 1.0, float("nan")), (100, 2.0, 1.0), loss=1.0)
    [row] = standings(dict(zip(full, [*curves, nan], strict=True)), margin=0.5)
    assert row.curve == [(50, 1.0, 4.0), (100, 2.0, 2.0)]


def test_beside_plain_ddp_that_diverged_nothing_is_compared() -> None:
    race = LossRace(hooks=["none", "bf16"], rates=(0.1,), seeds=2, links=["10mbit"])
    full = {(cell.hook, cell.seed): cell for cell in race.cells() if cell.lr or cell.seed}
    good, bad = run_of((100, 1.0, 2.0), loss=2.0), run_of(loss=None, error="NonFiniteError: w")
    measured = {cell: bad if key == ("none", 1) else good for key, cell in full.items()}
    none, other = standings(measured, margin=0.5)
    assert none.median_loss == math.inf and none.curve == []
    for row in (none, other):
        assert (row.above_plain, row.less, row.steps_to_target, row.bytes_to_target) == (None, None, None, None)
        assert (row.seconds_to_target, row.of_best_other) == ({}, {})


def test_one_real_run_of_local_updates() -> None:
    cell = HookCell(
        hook="local-sgd[h=2]",
        model="byte-transformer",
        data="python-text",
        ranks=2,
        steps=4,
        eval_every=3,
        eval_examples=8,
    )
    run = measure(cell, counted=True)
    assert (run.ended, run.error, run.steps_done) == ("steps", None, 4)
    assert [point.step for point in run.curve] == [3, 4] and run.test_loss is not None
    assert run.test_loss == run.curve[-1].loss and 2 < run.test_loss < 5.5
    if run.shaping == "kernel":
        sent = [point.sent_bytes for point in run.curve]
        assert isinstance(sent[0], float) and isinstance(sent[1], float) and 0 < sent[0] <= sent[1]
        # Four steps of 120,064 values in float32 would be 960 kB a rank.
        assert run.sent_bytes_per_step and 1_000 < run.sent_bytes_per_step < 40_000


def test_races_that_cannot_be() -> None:
    for options, text in (
        ({"rates": ()}, "rates"),
        ({"rates": (0.0,)}, "all of them positive"),
        ({"hooks": ["fp32x"]}, "unknown hook 'fp32x'"),
        ({"hooks": ["diloco[h=0]"]}, "h is 0"),
        ({"hooks": ["mps"]}, "unknown hook 'mps'"),
        ({"hooks": ["none", "3lc[s=1.75,start_step=50]"]}, "start_step=50.*uncompressed ones take another"),
    ):
        with pytest.raises(ConfigError, match=text):
            LossRace(**options)
    assert LossRace(hooks=["powersgd-1", "3lc[start_step=3]"]).cells(), "these steps are of the warm-up"
