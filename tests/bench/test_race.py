"""The race: who is stopped, who wins, and what a table of seeds says. Ranks are scripts that say what we want heard."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire.bench.charts import draw_race
from thinwire.bench.hooks import Cell
from thinwire.bench.race import RUNNERS, race, standings
from thinwire.errors import ConfigError

COURSE = Cell(hook="none", ranks=2, steps=40, eval_every=10, target=0.8)

# A rank that trains at its hook's pace, on a clock of its own, and is 20 % better after each evaluation.
SCRIPT = """
import json, pathlib, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
cell, rank, gate = json.loads(options["--cell"]), int(options["--rank"]), pathlib.Path(options["--gate"])
pace = json.loads(PACES)[cell["hook"]] * (1 + cell["seed"])
stumbles = pace < 0
pace = abs(pace)
if pace == 0:
    sys.exit("out of breath")

def say(event, **more):
    print(json.dumps({"event": event, "rank": rank, **more}), flush=True)

def wait(name):
    while not (gate / name).exists():
        time.sleep(0.01)

say("warm")
wait("warm")
for step in range(1, cell["steps"] + 1):
    if rank == 0:
        say("progress", step=step, steps=cell["steps"], seconds=step * pace)
        if step % cell["eval_every"] == 0:
            say("score", step=step, seconds=step * pace, accuracy=step / 50)
    if stumbles and rank == 0 and step == 15:
        sys.exit("holds NaN")
say("measured")
wait("measured")
say("outcome", cpu_seconds=1.0, cpu_seconds_alone=0.01, weights="same", report="")
"""


def ranks_that_run(paces: dict[str, float]) -> list[str]:
    return [sys.executable, "-c", SCRIPT.replace("PACES", repr(json.dumps(paces)))]


def test_who_is_slower_than_the_limit_is_stopped_and_the_best_time_counts() -> None:
    paces = {"3lc": 2.0, "fp16": 30.0, "powersgd-1": 1.0, "bf16": 2.5}
    outcomes = list(race(COURSE, list(paces), [0], ranks_that_run(paces), give_up=2.0))
    assert [outcome["ended"] for outcome in outcomes] == ["target", "limit", "target", "limit"]
    assert [outcome["seconds_to_target"] for outcome in outcomes] == [80.0, None, 40.0, None]
    # Stopped at the first step past 2 × 80 s, with fp16's 30 s a step; and past 2 × 40 s with bf16's 2.5 s.
    assert [outcomes[1]["seconds"], outcomes[3]["seconds"]] == [180.0, 82.5]
    assert [point["step"] for point in outcomes[3]["curve"]] == [10, 20, 30]


def test_every_seed_is_a_race_of_its_own_and_a_crash_is_a_row() -> None:
    paces = {"3lc": 1.0, "onebit": 0.0, "fp16": 1.5}
    outcomes = list(race(COURSE, list(paces), [0, 1], ranks_that_run(paces), give_up=3.0))
    assert [outcome["ended"] for outcome in outcomes] == ["target", "error", "target"] * 2
    assert [outcome["seed"] for outcome in outcomes] == [0, 0, 0, 1, 1, 1]
    ours, crashed, stock = standings(outcomes)
    assert ours["seconds"] == {0: 40.0, 1: 80.0} and ours["median_seconds"] == 60.0
    assert ours["steps"] == {0: 40, 1: 40}
    assert ours["of_best_stock"] == pytest.approx(60 / 90) and stock["of_best_stock"] == 1.0
    assert crashed["median_seconds"] is None and crashed["of_best_stock"] is None
    assert set(crashed["ended"].values()) == {"error"}


def test_the_median_stands_where_more_than_half_reached_the_target() -> None:
    def run(hook: str, seed: int, seconds: float | None) -> dict[str, Any]:
        named: dict[str, Any] = {
            "model": "lenet",
            "link": None,
            "hook": hook,
            "seed": seed,
            "target": 0.8,
            "curve": [],
            "seconds": 30.0,
        }
        return {**named, "seconds_to_target": seconds, "ended": "target" if seconds else "limit"}

    late, ours = "powersgd-1[start_step=9]", "3lc[s=1.75,start_step=9]"
    given = {late: (8.0, None, 10.0), ours: (None, 5.0, None), "bf16": (20.0, 20.0, 20.0)}
    rows = standings([run(hook, seed, seconds) for hook, times in given.items() for seed, seconds in enumerate(times)])
    assert [row["median_seconds"] for row in rows] == [10.0, None, 20.0]
    assert [row["of_best_stock"] for row in rows] == [1.0, None, 2.0], "a stock hook that begins late is stock"


def test_who_stumbles_keeps_what_it_got_to() -> None:
    stumbling, other = race(COURSE, ["topk", "fp16"], [0], ranks_that_run({"topk": -2.0, "fp16": 9.0}), give_up=1.0)
    assert (stumbling["ended"], other["ended"]) == ("error", "target"), "and its time stops nobody"
    assert [point["accuracy"] for point in stumbling["curve"]] == [0.2]
    assert (stumbling["steps_done"], stumbling["seconds"]) == (15, 30.0)
    assert "holds NaN" in stumbling["error"]


def test_a_target_that_is_out_of_reach_stops_nobody() -> None:
    paces = {"3lc": 1.0, "fp16": 9.0}
    course = Cell(hook="none", ranks=2, steps=20, eval_every=10, target=0.8)
    outcomes = list(race(course, list(paces), [0], ranks_that_run(paces)))
    assert [(outcome["ended"], outcome["steps_done"]) for outcome in outcomes] == [("steps", 20)] * 2
    assert standings(outcomes)[0]["median_seconds"] is None


@pytest.mark.parametrize(
    ("course", "hooks", "give_up"),
    [(Cell(hook="none"), ["fp16"], 3.0), (COURSE, [], 3.0), (COURSE, ["fp16"], 0.5), (COURSE, ["fp16"], float("nan"))],
)
def test_a_race_that_cannot_be_is_refused_before_it_starts(course: Cell, hooks: list[str], give_up: float) -> None:
    with pytest.raises(ConfigError, match="a race needs a target"):
        race(course, hooks, [0], ["false"], give_up=give_up)


def test_the_default_runners_can_all_run() -> None:
    assert {Cell(hook=hook).hook for hook in RUNNERS} >= {"fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4"}


def test_the_picture_has_one_entry_for_each_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def watched(figure: Figure, path: Path) -> None:
        drawn.append(figure)
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", watched)
    curve = [{"step": 1, "seconds": 1.0, "accuracy": 0.5}, {"step": 2, "seconds": 2.0, "accuracy": 0.7}]
    outcomes = [
        {"model": "lenet", "hook": hook, "link": link, "seed": seed, "target": 0.6, "curve": curve}
        for hook in ("fp16", "3lc")
        for link in ("10mbit", None)
        for seed in (0, 1)
    ]
    draw_race(outcomes, tmp_path / "deep" / "race.png")
    assert (tmp_path / "deep" / "race.png").read_bytes().startswith(b"\x89PNG")
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == ["lenet, 10mbit", "lenet, unlimited"]
    legend = panels[0].get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["fp16", "3lc"]
    assert len(panels[0].lines) == 5 and len({line.get_color() for line in panels[0].lines[:4]}) == 2
