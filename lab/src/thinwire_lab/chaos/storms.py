"""Storms: trainings that faults strike, of one design or of all, once or again and again.

A storm ends right where the last step is reached with equal weights, no gradient was lost or counted twice, and the
accuracy is no more than `points` below that of the same training without faults. In trainings of more than ten minutes
the server's memory, descriptors and threads must not grow. Where no fault strikes a worker, as
after the death of a server that resumes, the weights equal those of that training bit for bit.
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
from thinwire_lab.chaos.faults import EXACT, KINDS, OF_THE_SERVER, RETURNING, WITHOUT_PRIVILEGES, Fault, draw, scatter
from thinwire_lab.chaos.options import StormsOptions
from thinwire_lab.chaos.outcome import Outcome, with_problem
from thinwire_lab.chaos.stage import Stage
from thinwire_lab.chaos.trials import Trial, staged
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.cluster import Links, choose_links
from thinwire_lab.jobs.forks import forks
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.processes import Elastic
from thinwire_lab.workloads.data import data

PEACE = "peace"


@dataclass(kw_only=True)
class Storms(StormsOptions, Bench[Trial, Outcome]):
    """Storms, each of a design of its own and of a few kinds of faults, drawn by its number.

    Designs whose workers alone hold the model are spared deaths, after which no process could give it to a new one.
    """

    kinds = (Outcome,)
    serves = True
    key_options = (
        *("shaping", "fork", "min_workers", "worker_grace_s"),
        *("every", "strikes", "checkpoint_every", "points"),
    )
    left = 3
    columns = (
        ("trial", lambda cell, run: str(cell)),
        ("design", lambda cell, run: cell.design),
        ("ended", lambda cell, run: "right" if not run.problems else "NOT RIGHT"),
        ("faults", lambda cell, run: str(len(run.faults))),
        ("steps", lambda cell, run: str(run.steps)),
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
        if self.runs < 1:
            raise ConfigError(f"{self.runs} runs; at least 1 is needed")
        self.elastic().check(self.workers)
        if unknown := [kind for kind in self.faults if kind not in KINDS] or ([] if self.faults else ["none"]):
            raise ConfigError(f"fault {unknown[0]!r}; there are {', '.join(KINDS)}")
        if self.steps < 30:
            raise ConfigError(f"{self.steps} steps; at least 30 are needed, for something to happen in their middle")
        if self.every < 1:
            raise ConfigError(f"a fault every {self.every} rounds; at least 1 is needed")
        if self.checkpoint_every > self.steps // 3 and {"server", "disk"} & set(self.faults):
            raise ConfigError(f"{self.steps} steps are too few for checkpoints every {self.checkpoint_every}")
        if "gone" in self.faults:
            spare = self.workers - consistency(self.consistency or "bsp").quorum(self.workers)
            if self.strikes is None or self.strikes > spare:
                raise ConfigError(f"deaths for good: {self.strikes} strikes with {spare} backup workers; take as many")
        for number in range(self.first, self.first + self.runs):
            suiting(self.faults, self.design_of(number))

    # ---- the grid

    def cells(self) -> list[Trial]:
        trials = [self._stormy(number) for number in range(self.first, self.first + self.runs)]
        names = dict.fromkeys(trial.design for trial in trials) if self.peace else ()
        return [*(self._trial(PEACE, -1, name) for name in names), *trials]

    def _stormy(self, number: int) -> Trial:
        trial = self._trial("storm", number, self.design_of(number))
        possible = suiting(self.possible(), trial.design)
        return replace(trial, faults=",".join(trial.chance.sample(possible, min(len(possible), 3))))

    def _trial(self, scenario: str, number: int, name: str) -> Trial:
        shared = ("seed", "model", "data", "workers", "link", "steps", "consistency")
        own = {name: getattr(self, name) for name in shared}
        return Trial(scenario=scenario, number=number, design=name, **own)

    def design_of(self, number: int) -> str:
        names = list(self.designs) or list(designs())
        return names[number % len(names)]

    def possible(self) -> list[str]:
        """Returns the kinds of `faults` that this machine and user can do."""
        kernel = self.links().shaping == "kernel"
        found = [kind for kind in self.faults if kernel or kind in WITHOUT_PRIVILEGES]
        if not found:
            raise ConfigError(
                f"faults {', '.join(self.faults)}: they need links that the kernel shapes, which are not to be had "
                f"here; name one of {', '.join(WITHOUT_PRIVILEGES)} too"
            )
        return found

    def thin_link(self) -> tuple[str | None, str]:
        return self.link, self.shaping

    def links(self) -> Links:
        """How the links are made; by the kernel where it may, also without a limit."""
        links = choose_links(self.link, self.shaping)
        if links.shaping == "none" and self.shaping == "auto":
            links = choose_links("100gbit", "auto")
            links = links if links.shaping == "kernel" else choose_links(None)
        return links

    # ---- one trial

    def elastic(self) -> Elastic:
        """The server's policy for workers that die."""
        least = self.min_workers or max(1, self.workers // 2)
        return Elastic(min_workers=least, worker_grace_s=self.worker_grace_s)

    def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
        kinds = [kind for kind in cell.faults.split(",") if kind]
        rounds = exchanges(cell.job())
        kept = min(self.checkpoint_every, max(1, rounds // 6)) if OF_THE_SERVER & set(kinds) else None
        exact = set(kinds) <= EXACT
        elastic = self.elastic()
        if exact or "gone" in kinds:  # no update goes without a worker, but those without a backup worker
            elastic = Elastic(worker_grace_s=None if exact else self.worker_grace_s)
        options: dict[str, Any] = {"elastic": elastic, "checkpoint_every": kept, "tiny_disk": "disk" in kinds}
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

        def play(stage: Stage) -> None:
            for number, fault in enumerate(storm, start=1):
                stage.until_step(fault.round)
                if stage.done:
                    break
                if stage.strike(fault):
                    struck.append(fault)
                tell(f"step {stage.audit.version}, fault {number} of {len(storm)}: {fault.kind}")
                if self.strikes is not None:
                    stage.until_back()

        outcome = staged(cell, self.links(), tell, play, **options)
        if not struck:
            outcome = with_problem(outcome, "nothing could strike")
        if self.strikes is not None:
            outcome = all_back(outcome, struck, self.strikes, cell.workers)
        return self.beside(cell, outcome, tell, exact=exact)

    def beside(self, cell: Trial, outcome: Outcome, tell: Tell, *, exact: bool) -> Outcome:
        """Returns the outcome beside the undisturbed training; too low an accuracy, or other weights, is a problem."""
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

    # ---- what came out

    def failed(self, figures: Outcome) -> bool:
        return bool(figures.problems)

    def line(self, cell: Trial, figures: Outcome) -> str:
        struck = "; ".join(figures.faults[:3]) + (f"; {len(figures.faults)} in all" if figures.faults[3:] else "")
        end = f"NOT RIGHT: {figures.problems[0]}" if figures.problems else "right"
        return f"{cell}: {struck or 'nothing'}: {end} ({figures.steps} steps, {figures.seconds:.0f} s)"

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
        said = [run.said_s for run in runs if run.said_s is not None]
        back = [seconds for run in runs for seconds in run.back_s]
        joining = [seconds for run in runs for seconds in run.joining_s]
        points = [run.points for run in runs if run.points is not None]
        notes = [f"{right} of {len(runs)} ended right; links {self.link}, shaped by: {self.links().shaping}"]
        notes += [f"other workers reported a death after at most {max(said):.2f} s"] if said else []
        notes += [f"back after {_spread(back)} s (least, median, most)"] if back else []
        notes += [f"of that, from their Join on {_spread(joining)} s: the rest is a process's start"] if joining else []
        notes += [f"accuracy beside the undisturbed training: {_spread(points, '+.2f')} points"] if points else []
        return notes


def all_back(outcome: Outcome, struck: Sequence[Fault], strikes: int, workers: int) -> Outcome:
    """Returns the outcome; faults that did not strike, and workers that did not take part again, are problems."""
    if len(struck) != strikes:
        outcome = with_problem(outcome, f"{len(struck)} of {strikes} faults could strike")
    expected = sum(workers if fault.kind == "server" else fault.kind in RETURNING for fault in struck)
    if len(outcome.back_s) != expected:
        outcome = with_problem(outcome, f"workers took part again {len(outcome.back_s)} times of {expected}")
    return outcome


def suits(kind: str, name: str) -> bool:
    """Returns whether a design is made for a fault.

    Where no shard has the model, no worker can begin late; `asp` has no steps, and learners that never wait have no
    common ones.

    >>> suits("kill", "3lc"), suits("kill", "terngrad"), suits("stop", "terngrad")
    (True, False, True)
    """
    chosen = design(name)
    if chosen.downlink == "gradient":
        return kind in KINDS.keys() - {"kill", "server"}
    policy = consistency(chosen.consistency)
    return kind not in OF_THE_SERVER or not (policy.immediate or policy.decoupled)


def suiting(kinds: Sequence[str], name: str) -> list[str]:
    """Returns the kinds of faults that a design is made for."""
    found = [kind for kind in kinds if suits(kind, name)]
    if not found:
        raise ConfigError(
            f"design {name!r} is made for none of the faults {', '.join(kinds)}; name other faults, or other designs"
        )
    return found


def exchanges(job: Job) -> int:
    """Returns how many rounds a training has, which may have several steps each."""
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
