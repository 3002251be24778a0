"""Decoupled learners beside workers that exchange in step: the cost of a slow learner, and of deaths.

Four learners, of speeds 1, 1, 1 and 1/3, train on thin links. *Goodput* and *deaths* measure real processes (`real`).
*Loss* takes the computed clock (`losses`): every design reads the same text in all, at equal speeds and at these. A
second run in step takes as many inner steps as the slowest learner takes in that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.errors import ConfigError
from thinwire.policies.designs import design
from thinwire.quantities import number_text
from thinwire_lab.bench.decoupled import losses, real
from thinwire_lab.bench.decoupled.learner import Learning
from thinwire_lab.bench.decoupled.losses import Loss
from thinwire_lab.bench.decoupled.real import Run
from thinwire_lab.bench.harness import Bench, Tell, column
from thinwire_lab.bench.options import ALONE, PARTS, DecoupledOptions
from thinwire_lab.jobs.cluster import Links, choose_links
from thinwire_lab.jobs.grid import Measured

EQUAL, UNEQUAL = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1 / 3)
BESIDE = ("as much text", "as long")
"""Titles: the loss minus the loss in step with the same seed."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training: of real processes for some seconds, or of some inner steps by the computed clock."""

    part: str
    learning: Learning
    seconds: float = 0.0
    kill_every_s: float | None = None
    steps: tuple[int, ...] = ()

    def __str__(self) -> str:
        how = f"{self.seconds:g} s" if self.seconds else f"steps {self.steps}, seed {self.learning.seed}"
        return f"{self.part}: {self.learning.design}, {how}"


@dataclass(kw_only=True)
class DecoupledBench(DecoupledOptions, Bench[Cell, Run | Loss]):
    """The study."""

    kinds = (Run, Loss)
    serves = True
    key_options = ("link",)
    left = 4
    forms: ClassVar[Mapping[str, str]] = dict.fromkeys(BESIDE, "+.3f")
    columns = (
        ("part", lambda cell, run: cell.part),
        ("design", lambda cell, run: cell.learning.design),
        ("speeds", lambda cell, run: ", ".join(f"{each:.2g}" for each in cell.learning.speeds)),
        ("inner steps", lambda cell, run: ", ".join(map(str, cell.steps or run.steps))),
        ("seed", lambda cell, run: str(cell.learning.seed)),
        column("goodput", "goodput", "{:.3f}"),
        column("stall", "stall", "{:.2f}"),
        column("gap s", "gap_s", "{:.1f}"),
        column("deaths", "deaths", "{:d}"),
        column("merged", "merged", "{:.3f}"),
        column("below DDP", "below_ddp", "{:.0f}"),
        column("nats", "loss", "{:.3f}"),
        column("too busy", "overrun", "{:.1%}"),
    )

    def __post_init__(self) -> None:
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ConfigError(f"part {unknown[0]!r}; there are {', '.join(PARTS)}")
        for name in (self.design, *self.rivals):
            if (local := design(name).local) is None or bool(local.quorum) != (name == self.design):
                raise ConfigError(f"{name}: a decoupled design is compared with rivals that exchange in step")
        if min(self.pace_s, self.seconds, self.kill_every_s) <= 0:
            raise ConfigError("seconds have to be above 0")

    def cells(self) -> list[Cell]:
        rate = len(UNEQUAL) * self.steps / sum(UNEQUAL)
        uneven = tuple(round(rate * speed) for speed in UNEQUAL)
        cells = [
            Cell(part="goodput", learning=self._learning(name, UNEQUAL), seconds=self.seconds)
            for name in (ALONE, self.design, *self.rivals)
        ]
        mine = self._learning(self.design, UNEQUAL)
        cells.append(Cell(part="deaths", learning=mine, seconds=self.seconds, kill_every_s=self.kill_every_s))
        cells += [
            Cell(part="loss", learning=self._learning(name, speeds, seed), steps=steps)
            for seed in range(self.seeds)
            for name, speeds, steps in (
                (self.rivals[-1], EQUAL, (self.steps,) * 4),
                (self.rivals[-1], UNEQUAL, (min(uneven),) * 4),
                (self.design, EQUAL, (self.steps,) * 4),
                (self.design, UNEQUAL, uneven),
            )
        ]
        return [cell for cell in cells if cell.part in self.parts]

    def _learning(self, name: str, speeds: Sequence[float], seed: int = 0) -> Learning:
        return self.filled(Learning, design=name, speeds=speeds, seed=seed)

    def thin_link(self) -> tuple[str | None, str]:
        return (self.link if {"goodput", "deaths"} & set(self.parts) else None), "auto"

    def links(self) -> Links:
        """Returns the kind of the links."""
        return choose_links(self.link)

    def measure(self, cell: Cell, before: Measured[Cell, Run | Loss], tell: Tell) -> Run | Loss:
        if cell.steps:
            return losses.train(cell.learning, cell.steps, tell=tell)
        return real.run(cell.learning, cell.seconds, self.links(), kill_every_s=cell.kill_every_s, tell=tell)

    def line(self, cell: Cell, figures: Run | Loss) -> str:
        goodput = f", goodput {figures.goodput:.3f}" if isinstance(figures, Run) else ""
        return f"{cell}: {number_text(figures.loss, '.3f')} nats a byte{goodput}"

    def compared(self, cell: Cell, measured: Measured[Cell, Run | Loss]) -> dict[str, float | None]:
        found: dict[str, float | None] = dict.fromkeys(BESIDE)
        mine = measured[cell].loss
        for other, run in measured.items():
            rivals = other.part == cell.part == "loss" and cell.learning.design == self.design != other.learning.design
            if not rivals or other.learning.seed != cell.learning.seed or mine is None or run.loss is None:
                continue
            if other.learning.speeds == EQUAL:
                found["as much text"] = mine - run.loss
            elif cell.learning.speeds == UNEQUAL:
                found["as long"] = mine - run.loss
        return found if "loss" in self.parts else {}

    def notes(self, measured: Measured[Cell, Run | Loss]) -> list[str]:
        local, runs = design(self.design).local, [run for run in measured.values() if isinstance(run, Run)]
        if local is None or not runs:
            return []
        return [
            f"links {self.link}, shaped by: {runs[0].shaping}; bytes by the kernel's count, with headers",
            "below DDP: bytes of a ring's all-reduce of float32, computed without headers, over the counted bytes",
            f"a gap may last the grace, {local.grace:g} s, and a push interval, {local.h * self.pace_s:.1f} s",
        ]
