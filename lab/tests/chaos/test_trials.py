"""Trials say what they are, are judged by what they came to, and can be played again by their number."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench.harness import Bench, Measured, Tell, run
from thinwire_lab.chaos.deaths import BackupDeath, ServerDeath, WorkerDeath
from thinwire_lab.chaos.outcome import Outcome, Sample
from thinwire_lab.chaos.soak import Soak, growth, sample, thread_names
from thinwire_lab.chaos.stage import SERVER
from thinwire_lab.chaos.storms import Storm, Storms, exchanges
from thinwire_lab.chaos.trials import Scenario, Trial
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.results import Results

RIGHT = Outcome(problems=[], faults=["kill worker 1 at 7"], steps=60, said_s=0.2, back_s=(4.0, 6.0), accuracy=0.97)


class Scripted(WorkerDeath):
    """One whose trials come to what is wanted."""

    def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
        if cell.number == 1:
            return Outcome(problems=["nobody reached the end"], faults=["kill worker 0 at 9"], steps=9)
        return self.beside(cell, RIGHT, tell, points=self.points)


def collected(bench: Bench[Trial, Outcome], path: Path) -> dict[Trial, list[Outcome]]:
    measured: dict[Trial, list[Outcome]] = {}
    run(bench, Results(path, [Outcome]), measured)
    return measured


def test_a_scenario_says_what_ended_right_and_goes_on_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reference:
        test_accuracy = 0.98

    monkeypatch.setattr(Scenario, "undisturbed", lambda *_: Reference)
    bench = Scripted(runs=3, workers=2, steps=60, link="none", shaping="application", points=2.0)
    measured = collected(bench, tmp_path / "trials.json")
    assert measured == collected(bench, tmp_path / "trials.json"), "what was measured is read back as it was"
    assert [bench.failed(runs[0]) for runs in measured.values()] == [False, True, False]
    assert bench.notes(measured)[:3] == [
        "2 of 3 ended right; links none, shaped by: none",
        "the others said so after at most 0.20 s",
        "back after 4.0 … 6.0 … 6.0 s (least, median, most)",
    ]
    [table] = bench.tables(measured)
    assert [line[2] for line in table.lines] == ["right", "NOT RIGHT", "right"]
    chart = bench.chart(measured)
    assert chart is not None and chart.panels[0].kind == "points"
    [strict] = collected(Scripted(runs=1, points=0.5), tmp_path / "strict.json").values()
    assert strict[0].problems == ["1.0 points below the undisturbed accuracy"]


def test_trials_are_told_apart_and_played_again_by_number() -> None:
    storms = Storms(runs=30, seed=5, shaping="application", link="none")
    trials = storms.cells()
    assert len({trial.design for trial in trials}) > 20 and len({trial.faults for trial in trials}) > 5
    assert Storms(first=17, runs=1, seed=5, shaping="application", link="none").cells() == [trials[17]]
    assert trials[17].chance.random() == trials[17].chance.random() != trials[18].chance.random()
    for trial in trials:
        if trial.job().full_design().downlink == "gradient":
            assert "kill" not in trial.faults and "server" not in trial.faults, trial
    assert [trial.scenario for trial in Storm().cells()] == ["peace", "storm"]
    assert BackupDeath(spare=2).cells()[0].job().consistency == "backup[2]"


def test_rounds_of_designs_that_do_not_exchange_in_every_step() -> None:
    expected = {"fp32": 60, "local2": 30, "diloco[h=15]": 4}
    assert {name: exchanges(Job(design=name, steps=60)) for name in expected} == expected


def test_options_that_cannot_be() -> None:
    cases: list[tuple[type[Scenario], dict[str, Any], str]] = [
        (WorkerDeath, {"runs": 0}, "0 runs"),
        (WorkerDeath, {"steps": 5}, "5 steps; at least 30"),
        (BackupDeath, {"spare": 4}, "4 spare workers of 4"),
        (ServerDeath, {"checkpoint_every": 200}, "too few for checkpoints every 200"),
        (Storm, {"faults": ("kill", "flood")}, "fault 'flood'"),
        (Storms, {"designs": ("terngrad",), "faults": ("kill", "server")}, "'terngrad' is made for none .*kill, ser"),
        (Soak, {"minutes": 0.0}, "both are positive and finite"),
        (Soak, {"minutes": math.inf}, "both are positive and finite"),
        (Soak, {"growth_mb": math.nan}, "growth_mb=nan; the server's memory may grow by 0 MB or more"),
        (Soak, {"workers": 1}, "2 workers or more"),
    ]
    for kind, given, said in cases:
        with pytest.raises(ConfigError, match=said):
            kind(**given)


def test_storms_whose_design_suits_no_fault_are_of_those_that_are_run() -> None:
    given: dict[str, Any] = {"faults": ("kill",), "shaping": "application", "link": "none"}
    assert [trial.design for trial in Storms(designs=("3lc", "terngrad"), runs=1, **given).cells()] == ["3lc"]
    with pytest.raises(ConfigError, match="terngrad"):
        Storms(designs=("3lc", "terngrad"), first=1, runs=1, **given)
    cut = Storms(designs=("3lc",), **{**given, "faults": ("cut",)})
    with pytest.raises(ConfigError, match="faults cut: they need links that the kernel shapes"):
        cut.cells()


def test_a_server_that_has_just_died_is_no_sample() -> None:
    with subprocess.Popen(["true"]) as gone:
        stage: Any = SimpleNamespace(engine=SimpleNamespace(pids={SERVER: gone.pid}), audit=SimpleNamespace(version=7))
        os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
        assert sample(stage, 1.0) is None, "nobody has waited for it yet: its status has no memory in it"
    assert sample(stage, 1.0) is None
    stage.engine.pids = {}
    assert sample(stage, 1.0) is None
    stage.engine.pids = {SERVER: os.getpid()}
    own = sample(stage, 1.234)
    assert own is not None and own.minute == 1.23 and own.rss_mb > 1 and own.version == 7


def test_a_soak_draws_all_trainings() -> None:
    bench = Soak(runs=3)
    taken = tuple(Sample(minute=at, rss_mb=200.0 + at, descriptors=30, threads=9, version=0) for at in range(3))
    outcomes = [Outcome(problems=[], faults=[], steps=1, samples=some) for some in (taken, taken[:2], ())]
    measured = {cell: [outcome] for cell, outcome in zip(bench.cells(), outcomes, strict=True)}
    chart = bench.chart(measured)
    assert chart is not None
    assert [panel.y_label for panel in chart.panels] == ["MB", "descriptors", "threads"]
    for panel in chart.panels:
        assert [(each.label, list(each.x)) for each in panel.series] == [("soak 0", [0, 1, 2]), ("soak 1", [0, 1])]
    assert chart.panels[0].series[0].y == [200.0, 201.0, 202.0]
    assert bench.chart({cell: [outcomes[2]] for cell in bench.cells()}) is None


def test_growth_is_noticed_and_comings_and_goings_are_not() -> None:
    def samples(rss: float = 0.0, descriptors: float = 0.0, threads: float = 0.0) -> list[Sample]:
        return [
            Sample(
                minute=minute,
                rss_mb=300 + minute % 3 + rss * minute,
                descriptors=30 + minute % 2 + int(descriptors * minute),
                threads=20 + minute % 2 + int(threads * minute),
                version=minute,
                thread_names={"python": 18, "poller": 2 + minute % 2 + int(threads * minute)},
            )
            for minute in range(60)
        ]

    assert growth([], 5.0) == growth(samples(), 5.0) == growth(samples()[:2], 5.0) == []
    for given, said in (
        ({"rss": 0.5}, "grew by"),
        ({"descriptors": 0.2}, "descriptors"),
        ({"threads": 0.1}, "threads grew from 21 to 23 since minute 10 (5 poller)"),
    ):
        [problem] = growth(samples(**given), 5.0)
        assert said in problem


def test_a_process_own_threads_are_counted_by_name() -> None:
    assert sum(thread_names(Path("/proc/self")).values()) >= 1
