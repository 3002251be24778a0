"""Storms: trials by number, their problems, their options."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench.harness import Tell
from thinwire_lab.chaos.faults import Fault
from thinwire_lab.chaos.stage import Sample
from thinwire_lab.chaos.storms import PEACE, Storms, check_returns, exchanges
from thinwire_lab.chaos.trials import Outcome, Trial, growth
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.grid import Measured, run
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.results import Results

UNSHAPED: dict[str, Any] = {"shaping": "application", "link": "none"}
RIGHT = Outcome(problems=[], struck=["server at 7"], steps_done=60, back_s=(4.0, 6.0), accuracy=0.97, weights=("w",))


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "run", lambda _: SimpleNamespace(test_accuracy=0.98, weights="w"))


@pytest.mark.usefixtures("undisturbed")
def test_storms_report_problems_and_continue_from_their_file(tmp_path: Path) -> None:
    class Scripted(Storms):
        def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
            if cell.number == 1:
                return Outcome(problems=["no worker reached the end"], struck=["kill worker 0 at 9"], steps_done=9)
            return self.compare_undisturbed(cell, RIGHT, tell, exact=False)

    def collected() -> dict[Trial, Outcome]:
        measured: dict[Trial, Outcome] = {}
        run(bench, Results(tmp_path / "trials.json", [Outcome]), measured)
        return measured

    bench = Scripted(runs=3, workers=2, steps=60, faults=("server",), designs=("3lc",), **UNSHAPED)
    measured = collected()
    assert measured == collected(), "the file holds all results"
    assert [bench.failed(run) for run in measured.values()] == [False, True, False]
    assert bench.notes(measured)[0].startswith("2 of 3 ended right")
    assert bench.notes(measured)[1] == "back after 4.0 … 6.0 … 6.0 s (least, median, most)"
    [table] = bench.tables(measured)
    assert [line[2] for line in table.lines] == ["right", "NOT RIGHT", "right"]


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("changed", "consistency", "exact", "problems"),
    [
        ({}, None, True, []),
        ({"accuracy": 0.9}, None, False, ["8.0 points below the undisturbed accuracy"]),
        ({"weights": ("v",)}, None, True, ["weights ('v',); undisturbed they are w"]),
        ({"weights": ("v",)}, None, False, []),
        ({"weights": ("v",)}, "asp", True, []),
    ],
)
def test_storm_reports_low_accuracy_and_other_weights_in_lockstep(
    changed: dict[str, Any], consistency: str | None, exact: bool, problems: list[str]
) -> None:
    storms = Storms(runs=1, workers=2, faults=("stop",), designs=("3lc",), consistency=consistency, **UNSHAPED)
    [cell] = storms.cells()
    given = msgspec.structs.replace(RIGHT, **changed)
    assert storms.compare_undisturbed(cell, given, lambda text: None, exact=exact).problems == problems


def test_storm_reports_missing_returns_and_faults() -> None:
    kill, gone, server = (Fault(round=7, kind=kind, rank=0) for kind in ("kill", "gone", "server"))
    assert check_returns(RIGHT, [server], 1, workers=2).problems == []
    assert check_returns(msgspec.structs.replace(RIGHT, back_s=()), [gone], 1, workers=2).problems == []
    assert check_returns(RIGHT, [kill], 1, workers=2).problems == ["workers returned 2 times of 1"]
    assert check_returns(RIGHT, [server], 2, workers=2).problems == ["1 of 2 faults could occur"]


def test_trials_are_drawn_by_number() -> None:
    trials = Storms(runs=30, seed=5, **UNSHAPED).cells()
    assert len({trial.design for trial in trials}) > 20 and len({trial.faults for trial in trials}) > 5
    assert Storms(first=17, runs=1, seed=5, **UNSHAPED).cells() == [trials[17]]
    assert trials[17].chance.random() == trials[17].chance.random() != trials[18].chance.random()
    for trial in trials:
        if trial.job().full_design().downlink == "gradient":
            assert "kill" not in trial.faults and "server" not in trial.faults, trial
    calm = Storms(runs=2, designs=("3lc",), peace=True, **UNSHAPED).cells()
    assert [trial.scenario for trial in calm] == [PEACE, "storm", "storm"]


def test_exchanges_of_designs_with_local_steps() -> None:
    expected = {"fp32": 60, "local2": 30, "diloco[h=15]": 4}
    assert {name: exchanges(Job(design=name, steps=60)) for name in expected} == expected


def test_storms_impossible_options_raise_config_error() -> None:
    gone: dict[str, Any] = {"faults": ("gone",), "designs": ("3lc",), "consistency": "backup[1]"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"steps": 5}, "5 steps"),
        ({"checkpoint_every": 200}, "every 200"),
        ({"faults": ("kill", "flood")}, "'flood'"),
        ({"designs": ("terngrad",), "faults": ("kill", "server")}, "'terngrad' .*kill, ser"),
        ({**gone, "strikes": 2}, "2 strikes with 1 backup workers"),
        (gone, "None strikes"),
    ]
    for given, said in cases:
        with pytest.raises(ConfigError, match=said):
            Storms(**given)
    assert Storms(**gone, strikes=1, runs=1, **UNSHAPED).cells()[0].job().consistency == "backup[1]"


def test_growth_ignores_fluctuations_and_the_first_minutes() -> None:
    def samples(rss: float = 0.0, descriptors: float = 0.0, threads: float = 0.0) -> list[Sample]:
        return [
            Sample(
                minute=minute,
                rss_mb=300 + minute % 3 + rss * minute,
                descriptors=30 + minute % 2 + int(descriptors * minute),
                threads=20 + minute % 2 + int(threads * minute),
            )
            for minute in range(60)
        ]

    assert growth([]) == growth(samples()) == growth(samples(rss=9)[:10]) == [], "ten minutes are not over"
    for given, said in (
        ({"rss": 0.5}, "grew by"),
        ({"descriptors": 0.2}, "descriptors"),
        ({"threads": 0.1}, "threads"),
    ):
        [problem] = growth(samples(**given))
        assert said in problem
