"""Learners that never wait beside workers that exchange in step, and what deaths and slow learners cost each.

Four learners, of speeds 1, 1, 1 and 1/3, on thin links. *Goodput* and *deaths* are of real processes, which sleep to
keep their paces. *Loss* is by the computed clock (`losses`): as much text in all for every design, once at equal speeds
and once at these; and in step as many inner steps as the slowest learner takes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.errors import ConfigError
from thinwire.policies.designs import design
from thinwire.quantities import number_text
from thinwire_lab.bench.decoupled import losses, real
from thinwire_lab.bench.decoupled.learning import ALONE, Learning
from thinwire_lab.bench.decoupled.losses import Loss
from thinwire_lab.bench.decoupled.options import PARTS, DecoupledOptions
from thinwire_lab.bench.decoupled.real import Run
from thinwire_lab.bench.harness import Bench, Tell
from thinwire_lab.jobs.cluster import Links, choose_links
from thinwire_lab.jobs.grid import Measured

EQUAL, UNEQUAL = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1 / 3)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training.

    Args:
        part: of the study.
        learning: what all learners train.
        seconds, kill_every_s: of real processes.
        steps: of each learner, by the computed clock.
    """

    part: str
    learning: Learning
    seconds: float | None = None
    kill_every_s: float | None = None
    steps: tuple[int, ...] | None = None

    def __str__(self) -> str:
        how = f"{self.seconds:g} s" if self.seconds else f"steps {self.steps}, seed {self.learning.seed}"
        return f"{self.part}: {self.learning.design}, {how}"


@dataclass(kw_only=True)
class DecoupledBench(DecoupledOptions, Bench[Cell, Run | Loss]):
    """The study."""

    kinds = (Run, Loss)
    serves = True
    key_options = ("link",)
    forms: ClassVar[Mapping[str, str]] = {"as much text": "+.3f", "as long": "+.3f"}
    left = 4
    columns = (
        ("part", lambda cell, run: cell.part),
        ("design", lambda cell, run: cell.learning.design),
        ("speeds", lambda cell, run: ", ".join(f"{each:.2g}" for each in cell.learning.speeds)),
        ("inner steps", lambda cell, run: ", ".join(map(str, run.steps if isinstance(run, Run) else cell.steps))),
        ("seed", lambda cell, run: str(cell.learning.seed)),
        *(
            (title, lambda cell, run, name=name, form=form: number_text(getattr(run, name, None), form))
            for title, name, form in (
                ("goodput", "goodput", ".3f"),
                ("stall", "stall", ".2f"),
                ("gap s", "gap_s", ".1f"),
                ("deaths", "deaths", "d"),
                ("merged", "merged", ".3f"),
                ("nats", "loss", ".3f"),
                ("too busy", "overrun", ".1%"),
            )
        ),
    )

    def __post_init__(self) -> None:
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ConfigError(f"part {unknown[0]!r}; there are {', '.join(PARTS)}")
        for name in (self.design, *self.rivals):
            if (local := design(name).local) is None or bool(local.quorum) != (name == self.design):
                raise ConfigError(f"{name}: a decoupled design is held against rivals that exchange in step")
        if self.pace_s <= 0 or self.seconds <= 0 or self.kill_every_s <= 0 or self.steps < 3:
            raise ConfigError("seconds are above 0, and steps at least 3")

    # ---- the grid

    def cells(self) -> list[Cell]:
        made: dict[str, Callable[[], Iterator[Cell]]] = {
            "goodput": self._goodput,
            "deaths": self._deaths,
            "loss": self._losses,
        }
        return [cell for part in self.parts for cell in made[part]()]

    def _learning(self, name: str, speeds: Sequence[float], seed: int = 0) -> Learning:
        own = {name: getattr(self, name) for name in ("model", "lr", "pace_s", "eval_examples")}
        return Learning(design=name, speeds=speeds, seed=seed, **own)

    def _goodput(self) -> Iterator[Cell]:
        for name in (ALONE, self.design, *self.rivals):
            yield Cell(part="goodput", learning=self._learning(name, UNEQUAL), seconds=self.seconds)

    def _deaths(self) -> Iterator[Cell]:
        for name in (self.design,):
            learning = self._learning(name, UNEQUAL)
            yield Cell(part="deaths", learning=learning, seconds=self.seconds, kill_every_s=self.kill_every_s)

    def _losses(self) -> Iterator[Cell]:
        share = len(UNEQUAL) * self.steps / sum(UNEQUAL)
        uneven = tuple(round(share * speed) for speed in UNEQUAL)
        rival = self.rivals[-1]
        for seed in range(self.seeds):
            for name, speeds, steps in (
                (rival, EQUAL, (self.steps,) * 4),
                (self.design, EQUAL, (self.steps,) * 4),
                (self.design, UNEQUAL, uneven),
                (rival, UNEQUAL, (min(uneven),) * 4),
            ):
                yield Cell(part="loss", learning=self._learning(name, speeds, seed), steps=steps)

    # ---- one training

    def thin_link(self) -> tuple[str | None, str]:
        return (self.link if {"goodput", "deaths"} & set(self.parts) else None), "auto"

    def links(self) -> Links:
        """How the links are made."""
        return choose_links(self.link)

    def measure(self, cell: Cell, before: Measured[Cell, Run | Loss], tell: Tell) -> Run | Loss:
        if cell.steps is not None:
            return losses.train(cell.learning, cell.steps, tell=tell)
        assert cell.seconds is not None
        return real.run(cell.learning, cell.seconds, self.links(), kill_every_s=cell.kill_every_s, tell=tell)

    # ---- what came out

    def line(self, cell: Cell, figures: Run | Loss) -> str:
        loss = "" if figures.loss is None else f", {figures.loss:.3f} nats a byte"
        return f"{cell}{loss}" + (f", goodput {figures.goodput:.3f}" if isinstance(figures, Run) else "")

    def compared(self, cell: Cell, measured: Measured[Cell, Run | Loss]) -> dict[str, float | None]:
        """The loss beside that of the same seed in step: as much text, or as long."""
        mine = measured[cell]
        if "loss" not in self.parts:
            return {}
        if cell.part != "loss" or cell.learning.design != self.design or mine.loss is None:
            return {"as much text": None, "as long": None}
        found: dict[str, float | None] = {"as much text": None, "as long": None}
        for other, run in measured.items():
            same = replace(other.learning, design=self.design, speeds=cell.learning.speeds) == cell.learning
            if other.part != "loss" or other.learning.design == self.design or not same or run.loss is None:
                continue
            if other.learning.speeds == EQUAL:
                found["as much text"] = mine.loss - run.loss
            elif cell.learning.speeds == UNEQUAL:
                found["as long"] = mine.loss - run.loss
        return found

    def notes(self, measured: Measured[Cell, Run | Loss]) -> list[str]:
        runs = [(cell, run) for cell, run in measured.items() if isinstance(run, Run)]
        notes = [f"links {self.link}, shaped by: {runs[0][1].shaping}"] if runs else []
        local = design(self.design).local
        assert local is not None
        if any(run.deaths for _, run in runs):
            notes.append(
                f"gap: at most grace {local.grace:g} s + a push interval {local.h * self.pace_s:.1f} s is asked"
            )
        for cell, run in runs:
            if run.carried:
                times = ring_nbytes(cell.learning) / run.carried
                notes.append(
                    f"{cell}: {run.carried / 2e3:.1f} kB each way a learner and step, {times:.0f}x below DDP's"
                )
        if any(run.carried for _, run in runs):
            notes.append(
                "DDP's: what a ring sends and receives of float32, without headers, computed; links: as counted"
            )
        return notes


def ring_nbytes(learning: Learning) -> float:
    """Returns how many bytes a rank sends and receives in a step of plain DDP, in a ring, without headers."""
    made, ranks = learning.training(0), len(learning.speeds)
    numel = sum(each.numel() for each in made.model.parameters())
    return 2 * 2 * (ranks - 1) / ranks * 4 * numel
