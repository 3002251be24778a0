"""Storms: trainings with faults, of one design or of all.

A storm ends right if all workers reach the last step with equal weights and no gradient was lost or counted twice. Its
accuracy is at most `points` below that of the same training without faults. In trainings of more than ten minutes the
server's memory, descriptors and threads must not grow. If no fault hits a worker, as after the death of a server that
resumes, the weights equal those of the undisturbed training bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from thinwire.errors import ConfigError
from thinwire.policies.consistency import consistency
from thinwire.policies.designs import design, designs
from thinwire.quantities import number_text
from thinwire_lab.bench.harness import Bench, Tell
from thinwire_lab.chaos.faults import KINDS, WITHOUT_PRIVILEGES, Fault, StormsOptions, draw, scatter
from thinwire_lab.chaos.stage import Stage
from thinwire_lab.chaos.trials import Outcome, Trial, staged, with_problem
from thinwire_lab.engines.starters import forks
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.cluster import Links, choose_links
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.processes import Elastic
from thinwire_lab.workloads.data import data

PEACE = "peace"


@dataclass(kw_only=True)
class Storms(StormsOptions, Bench[Trial, Outcome]):
    """Storms, each with one design and a few kinds of faults, drawn by its number.

    If the workers alone hold the model, no worker dies: no process could send the model to a new one.
    """

    kinds = (Outcome,)
    serves = True
    key_options = ("shaping", "fork", "worker_grace_s", "every", "strikes", "checkpoint_every", "points")
    left = 3
    columns = (
        ("trial", lambda cell, run: str(cell)),
        ("design", lambda cell, run: cell.design),
        ("ended", lambda cell, run: "right" if not run.problems else "NOT RIGHT"),
        ("faults", lambda cell, run: str(len(run.struck))),
        ("steps", lambda cell, run: str(run.steps_done)),
        ("steps / s", lambda cell, run: f"{run.steps_per_second:.1f}"),
        ("missing", lambda cell, run: f"{run.missing:.0f}"),
        ("late", lambda cell, run: f"{run.late:.0f}"),
        ("redone", lambda cell, run: str(run.redone)),
        ("slowest back s", lambda cell, run: number_text(max(run.back_s, default=None), ".1f")),
        ("accuracy", lambda cell, run: number_text(run.accuracy, ".2%")),
        ("points", lambda cell, run: number_text(run.points, "+.2f")),
    )
    _undisturbed: dict[Job, RunOutcome] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.faults if kind not in KINDS] or ([] if self.faults else ["none"]):
            raise ConfigError(f"fault {unknown[0]!r}; there are {', '.join(KINDS)}")
        if self.steps < 30:
            raise ConfigError(f"{self.steps} steps; at least 30 are needed")
        if self.checkpoint_every > self.steps // 3 and "server" in self.faults:
            raise ConfigError(f"{self.steps} steps are too few for checkpoints every {self.checkpoint_every}")
        if "gone" in self.faults:
            spare = self.workers - consistency(self.consistency or "bsp").quorum(self.workers)
            if self.strikes is None or self.strikes > spare:
                raise ConfigError(f"fault 'gone': {self.strikes} strikes with {spare} backup workers; take as many")
        for number in range(self.first, self.first + self.runs):
            suitable(self.faults, self.design_of(number))

    def cells(self) -> list[Trial]:
        trials = [self._stormy(number) for number in range(self.first, self.first + self.runs)]
        names = dict.fromkeys(trial.design for trial in trials) if self.peace else ()
        return [*(self._trial(PEACE, -1, name) for name in names), *trials]

    def _stormy(self, number: int) -> Trial:
        trial = self._trial("storm", number, self.design_of(number))
        possible = suitable(self.possible(), trial.design)
        return replace(trial, faults=",".join(trial.chance.sample(possible, min(len(possible), 3))))

    def _trial(self, scenario: str, number: int, name: str) -> Trial:
        return self.filled(Trial, scenario=scenario, number=number, design=name, faults="")

    def design_of(self, number: int) -> str:
        names = list(self.designs) or list(designs())
        return names[number % len(names)]

    def possible(self) -> list[str]:
        """Returns the kinds of `faults` that this user can cause on this machine."""
        kernel = self.links().shaping == "kernel"
        found = [kind for kind in self.faults if kernel or kind in WITHOUT_PRIVILEGES]
        if not found:
            raise ConfigError(
                f"faults {', '.join(self.faults)} need links that the kernel shapes, which is not possible here; "
                f"name one of {', '.join(WITHOUT_PRIVILEGES)} too"
            )
        return found

    def thin_link(self) -> tuple[str | None, str]:
        return self.link, self.shaping

    def links(self) -> Links:
        """Returns the kind of the links."""
        return choose_links(self.link, self.shaping)

    def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
        kinds = [kind for kind in cell.faults.split(",") if kind]
        rounds = exchanges(cell.job())
        kept = min(self.checkpoint_every, max(1, rounds // 6)) if "server" in kinds else None
        exact = set(kinds) <= {"server"}
        # Only with fewer than all workers as its minimum the server updates without a dead worker.
        least = None if exact or "gone" in kinds else max(1, self.workers // 2)
        elastic = Elastic(min_workers=least, worker_grace_s=None if exact else self.worker_grace_s)
        options: dict[str, Any] = {"elastic": elastic, "checkpoint_every": kept}
        options["starter"] = forks() if self.fork else None
        if cell.scenario == PEACE:
            return staged(cell, self.links(), tell, lambda stage: None, **options)
        seed = f"{cell.seed}/{cell.number}"
        if self.strikes is None:
            every = min(self.every, max(1, rounds // 6))
            storm = draw(seed, kinds, workers=cell.workers, every=every, rounds=rounds)
        else:
            first = 0 if kept is None else kept + 1
            storm = scatter(seed, kinds, workers=cell.workers, strikes=self.strikes, first=first, rounds=rounds)
        struck: list[Fault] = []

        def cause_faults(stage: Stage) -> None:
            for number, fault in enumerate(storm, start=1):
                stage.until_step(fault.round)
                if stage.done:
                    break
                if stage.strike(fault):
                    struck.append(fault)
                tell(f"step {stage.audit.version}, fault {number} of {len(storm)}: {fault.kind}")
                if self.strikes is not None:
                    stage.until_back()

        outcome = staged(cell, self.links(), tell, cause_faults, **options)
        if not struck:
            outcome = with_problem(outcome, "no fault could occur")
        if self.strikes is not None:
            outcome = check_returns(outcome, struck, self.strikes, cell.workers)
        return self.compare_undisturbed(cell, outcome, tell, exact=exact)

    def compare_undisturbed(self, cell: Trial, outcome: Outcome, tell: Tell, *, exact: bool) -> Outcome:
        """Compares the outcome with the undisturbed training: a lower accuracy and other weights are problems."""
        job = replace(cell.job(), link=None)
        if job not in self._undisturbed:
            tell("the same without faults, in one process")
            self._undisturbed[job] = in_process.run(job)
        expected = self._undisturbed[job]
        outcome = msgspec.structs.replace(outcome, undisturbed=expected.test_accuracy)
        if outcome.points is not None and outcome.points < -self.points:
            outcome = with_problem(outcome, f"{-outcome.points:.1f} points below the undisturbed accuracy")
        lockstep = consistency(cell.job().full_design().consistency).terms(cell.workers).lockstep
        if exact and lockstep and outcome.weights != (expected.weights,):
            outcome = with_problem(outcome, f"weights {outcome.weights}; undisturbed they are {expected.weights}")
        return outcome

    def failed(self, figures: Outcome) -> bool:
        return bool(figures.problems)

    def line(self, cell: Trial, figures: Outcome) -> str:
        struck = "; ".join(figures.struck[:3]) + (f"; {len(figures.struck)} in all" if figures.struck[3:] else "")
        end = f"NOT RIGHT: {figures.problems[0]}" if figures.problems else "right"
        return f"{cell}: {struck or 'no fault'}: {end} ({figures.steps_done} steps, {figures.seconds_taken:.0f} s)"

    def compared(self, cell: Trial, measured: Measured[Trial, Outcome]) -> dict[str, float | None]:
        if not self.peace:
            return {}
        for other, calm in measured.items():
            if (other.scenario, other.design) == (PEACE, cell.design) and calm.steps_per_second:
                return {"goodput": measured[cell].steps_per_second / calm.steps_per_second}
        return {"goodput": None}

    def notes(self, measured: Measured[Trial, Outcome]) -> list[str]:
        runs = list(measured.values())
        right = sum(not run.problems for run in runs)
        back = [seconds for run in runs for seconds in run.back_s]
        joining = [seconds for run in runs for seconds in run.joining_s]
        points = [run.points for run in runs if run.points is not None]
        notes = [f"{right} of {len(runs)} ended right; links {self.link}, shaped by: {self.links().shaping}"]
        notes += [f"back after {_spread(back)} s (least, median, most)"] if back else []
        notes += [f"from their Join on {_spread(joining)} s: the rest is a process's start"] if joining else []
        notes += [f"accuracy beside the undisturbed training: {_spread(points, '+.2f')} points"] if points else []
        return notes


def check_returns(outcome: Outcome, struck: Sequence[Fault], strikes: int, workers: int) -> Outcome:
    """Adds problems to the outcome: faults that did not occur, and workers that did not return."""
    if len(struck) != strikes:
        outcome = with_problem(outcome, f"{len(struck)} of {strikes} faults could occur")
    expected = sum(workers if fault.kind == "server" else fault.kind != "gone" for fault in struck)
    if len(outcome.back_s) != expected:
        outcome = with_problem(outcome, f"workers returned {len(outcome.back_s)} times of {expected}")
    return outcome


def suits(kind: str, name: str) -> bool:
    """Returns whether a design survives a fault.

    If no shard holds the model, no worker can begin late; `asp` has no steps, and decoupled learners share none.

    >>> suits("kill", "3lc"), suits("kill", "terngrad"), suits("stop", "terngrad")
    (True, False, True)
    """
    chosen = design(name)
    if chosen.downlink == "gradient":
        return kind not in ("kill", "server")
    policy = consistency(chosen.consistency)
    return kind != "server" or not (policy.immediate or policy.decoupled)


def suitable(kinds: Sequence[str], name: str) -> list[str]:
    """Returns the kinds of faults that a design survives."""
    found = [kind for kind in kinds if suits(kind, name)]
    if not found:
        raise ConfigError(
            f"design {name!r} survives none of the faults {', '.join(kinds)}; name other faults, or other designs"
        )
    return found


def exchanges(job: Job) -> int:
    """Returns the number of a training's exchanges, each after one step or several."""
    recipe = job.recipe()
    epoch = len(data(job.data, root=job.data_root, context=recipe.context).train_x) // job.workers // recipe.batch
    policy = consistency(job.full_design().with_epoch(epoch).consistency)
    rounds = 0
    while policy.iterations(rounds + 1) <= recipe.steps:
        rounds += 1
    return rounds


def _spread(values: Sequence[float], form: str = ".1f") -> str:
    """The least, the median and the most."""
    ordered = sorted(values)
    return " … ".join(format(each, form) for each in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))
