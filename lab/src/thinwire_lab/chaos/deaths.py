"""Deaths in the middle of a training: a worker's, a spare worker's, the server's."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire_lab.bench.harness import Measured, Tell
from thinwire_lab.chaos.faults import Fault
from thinwire_lab.chaos.options import BackupDeathOptions, ServerDeathOptions, WorkerDeathOptions
from thinwire_lab.chaos.outcome import Outcome, with_problem
from thinwire_lab.chaos.stage import Stage
from thinwire_lab.chaos.trials import COLUMNS, Scenario, Trial
from thinwire_lab.jobs.processes import Elastic


@dataclass(kw_only=True)
class WorkerDeath(WorkerDeathOptions, Scenario):
    """A worker is killed at a step at random, and the same command is started again.

    Right is: it took part again, everybody reached the last step with the same weights, no more than `points` below
    the undisturbed accuracy.

    Args:
        deaths: in each training, one after the other, of workers at random; each has to be back before the next.
        min_workers: of the server; None: one less than there are.
        worker_grace_s: of the server.
        points: percentage points that the accuracy may be below.
    """

    name = "worker-death"
    key_options = (*Scenario.key_options, "deaths", "min_workers", "worker_grace_s", "points")
    columns = COLUMNS

    def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
        chance = cell.chance
        victims = [chance.randrange(cell.workers) for _ in range(self.deaths)]
        steps = sorted(middle(chance.random(), cell.steps) for _ in victims)

        def play(stage: Stage) -> None:
            for number, (at, victim) in enumerate(zip(steps, victims, strict=True), start=1):
                tell(f"until step {at}")
                stage.until_step(at)
                if stage.done:
                    break  # who died before was not back in time
                stage.strike(Fault(round=stage.audit.version, kind="kill", rank=victim))
                tell(f"worker {victim} was killed, death {number} of {self.deaths}")
                stage.until_back()

        elastic = Elastic(min_workers=self.min_workers or max(1, self.workers - 1), worker_grace_s=self.worker_grace_s)
        elastic.check(cell.workers)
        outcome = self.staged(cell, tell, play, elastic=elastic)
        if len(outcome.back_s) != self.deaths:
            outcome = with_problem(outcome, f"{len(outcome.back_s)} of {self.deaths} that were killed took part again")
        return self.beside(cell, outcome, tell, points=self.points)


@dataclass(kw_only=True)
class BackupDeath(BackupDeathOptions, Scenario):
    """As many workers are killed for good as there are spare ones; the others reach the last step.

    The server then waits for the dead, says that they went away, and ends with an error: not everybody has reached the
    end.

    Args:
        spare: backup workers, b of `backup[b]`.
        worker_grace_s: of the server.
    """

    name = "backup-death"
    key_options = (*Scenario.key_options, "worker_grace_s")
    columns = COLUMNS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.spare < self.workers:
            raise ConfigError(f"{self.spare} spare workers of {self.workers}; expected 1 to {self.workers - 1}")

    def trial(self, number: int, **given: object) -> Trial:
        return super().trial(number, consistency=f"backup[{self.spare}]", **given)

    def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
        chance = cell.chance
        victims = chance.sample(range(cell.workers), self.spare)
        steps = sorted(middle(chance.random(), cell.steps) for _ in victims)

        def play(stage: Stage) -> None:
            for at, victim in zip(steps, victims, strict=True):
                tell(f"until step {at}")
                stage.until_step(at)
                stage.happened.append(Fault(round=stage.audit.version, kind="kill", rank=victim))
                stage.kill_worker(victim, again=False)
            stage.let_server_fail()

        return self.staged(cell, tell, play, elastic=Elastic(worker_grace_s=self.worker_grace_s))


@dataclass(kw_only=True)
class ServerDeath(ServerDeathOptions, Scenario):
    """The server is killed and started again with `--resume`; workers find back unaided.

    Right is: the weights at the end are bit for bit those of the undisturbed training.

    Args:
        deaths: in each training, one after the other.
        checkpoint_every: steps between checkpoints, of all processes.
    """

    name = "server-death"
    key_options = (*Scenario.key_options, "deaths", "checkpoint_every")
    columns = COLUMNS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.checkpoint_every <= self.steps // 3:
            raise ConfigError(
                f"{self.steps} steps are too few for checkpoints every {self.checkpoint_every}: take thrice that"
            )

    def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
        first, chance = self.checkpoint_every + 1, cell.chance
        steps = sorted(first + middle(chance.random(), cell.steps - first) for _ in range(self.deaths))

        def play(stage: Stage) -> None:
            for number, at in enumerate(steps, start=1):
                tell(f"until step {at}")
                stage.until_step(at)
                if stage.done:
                    break
                stage.strike(Fault(round=stage.audit.version, kind="server", rank=0))
                tell(f"the server was killed, death {number} of {self.deaths}")
                stage.until_back()

        expected = self.undisturbed(cell, tell)
        outcome = self.beside(cell, self.staged(cell, tell, play, checkpoint_every=self.checkpoint_every), tell)
        if len(outcome.back_s) != (expected_back := self.deaths * cell.workers):
            outcome = with_problem(outcome, f"workers found back {len(outcome.back_s)} times of {expected_back}")
        if outcome.weights != (expected.weights,):
            outcome = with_problem(outcome, f"weights {outcome.weights}; undisturbed they are {expected.weights}")
        return outcome


def middle(share: float, steps: int) -> int:
    """Returns a step between a tenth and six tenths of all: some have been taken, and some are to come.

    >>> middle(0.0, 200), middle(1.0, 200)
    (20, 120)
    """
    return round(steps * (0.1 + 0.5 * share))
