"""A race: the method that brings a model to a target in the fewest seconds of training on a thin link.

Image models race to a test accuracy. All methods have the same weights, data order, batches and learning rates by step,
and train on the link; uncompressed first steps count. The clock pauses during rank 0's evaluations. A run that misses
the target in several times the best time so far is stopped, and its time is a lower bound.

Text models race to a held-out loss. A link changes the time of a step and not its result: a method trains in full on
links without a limit, and a shorter run on each thin link gives its seconds per step (3LC §4.3). The first seed runs at
every learning rate of the grid. While a method's best learning rate is the lowest or the highest of two or more, its
grid grows by one beyond that. Other seeds and the links use the learning rate of the lowest loss. A timed run has whole
periods between exchanges and no uncompressed beginning, so no method may begin late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from thinwire.errors import ConfigError, NonFiniteError
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire.quantities import nbytes_text, number_text
from thinwire_lab.bench.cells import WARMUP, HookCell, timed
from thinwire_lab.bench.harness import Tell
from thinwire_lab.bench.hook_runs import HookRun, measure
from thinwire_lab.bench.hooks import HooksBench
from thinwire_lab.bench.names import hook, last_line
from thinwire_lab.bench.options import RACERS, RATES, RUNNERS, RaceOptions
from thinwire_lab.bench.standings import (
    Standing,
    best_rate,
    beyond,
    is_timed,
    last_loss,
    to_accuracy,
    to_loss,
    tried,
)
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.workloads.models import TEXT_MODELS

MAX_RATES = 8
"""A method's grid does not grow beyond this many learning rates."""
HEADER = ("method", "lr", "by seed", "median", "beside none", "to target: steps", "bytes", "s", "of best other")


@dataclass(kw_only=True)
class Race(RaceOptions, HooksBench):
    """Seconds of every method's training to an accuracy or a loss; the learning rate's schedule has `steps` steps."""

    def __post_init__(self) -> None:
        text = [model in TEXT_MODELS for model in self.models]
        self.to_loss = any(text)
        if self.to_loss and not all(text):
            raise ConfigError(f"models {', '.join(self.models)}: race text models and image models separately")
        self.hooks = self.hooks or (RACERS if self.to_loss else RUNNERS)
        self.eval_every = self.eval_every or (50 if self.to_loss else 25)
        self.eval_examples = self.eval_examples or (512 if self.to_loss else 2000)
        if self.rates and self.lr is not None:
            raise ConfigError("--lr is one learning rate and --rates a grid: give one of them")
        self.rates = self.rates or (RATES if self.lr is None else (self.lr,))
        if not all(math.isfinite(rate) and rate > 0 for rate in self.rates):
            raise ConfigError(f"rates {list(self.rates)}; learning rates are positive")
        if not self.give_up >= 1:
            raise ConfigError(f"give_up={self.give_up}; a race needs 1 or more")
        super().__post_init__()
        for name in self.hooks if self.to_loss else ():
            if hook(name).start_step > WARMUP:
                raise ConfigError(
                    f"hook {name!r}: a race to a loss assumes equal seconds for all steps on a link, and uncompressed "
                    "steps take longer; leave out start_step"
                )

    def clocked(self, cell: HookCell) -> HookCell:
        """Returns the run unchanged: in a race the uncompressed first steps count."""
        return cell

    def cell(self, model: str, link: str, seed: int, name: str) -> HookCell:
        return replace(super().cell(model, link, seed, name), target=None if self.to_loss else self.target_accuracy)

    def cells(self) -> list[HookCell]:
        """Returns the runs; to a loss, those at the learning rates of the grid."""
        if not self.to_loss:
            return super().cells()
        full = [self.cell(model, "none", self.seed, name) for model in self.models for name in self.hooks]
        return [replace(each, lr=rate) for each in full for rate in dict.fromkeys(self.rates)]

    def further(self, measured: Measured[HookCell, HookRun]) -> list[HookCell]:
        """Returns the runs beyond the edge of a method's grid; then its other seeds and links, with `lr` None."""
        if not self.to_loss:
            return []
        found: list[HookCell] = []
        for model in self.models:
            for name in self.hooks:
                rate = beyond(tried(model, name, measured), best_rate(model, name, measured), MAX_RATES)
                full = self.cell(model, "none", self.seed, name)
                found += self._at_best(full) if rate is None else [replace(full, lr=rate)]
        return found

    def _at_best(self, full: HookCell) -> list[HookCell]:
        seeds = range(self.seed + 1, self.seed + self.seeds)
        short = timed(replace(full, steps=self.timed_steps, eval_every=0, eval_examples=1), periods=2)
        links = [self.cell(full.model, link, self.seed, full.hook).link for link in self.links]
        return [
            *(replace(full, lr=None, seed=seed) for seed in seeds),
            *(replace(short, lr=None, link=link) for link in dict.fromkeys(links)),
        ]

    def key(self, cell: HookCell) -> dict[str, Any]:
        """Returns the key of a result; the full runs to a loss do not depend on the timed runs' limit."""
        limit = {} if self.to_loss else {"give_up": self.give_up}
        if self.to_loss and is_timed(cell):
            limit = {"timed_seconds": self.timed_seconds}
        return super().key(cell) | limit

    def measure(self, cell: HookCell, before: Measured[HookCell, HookRun], tell: Tell) -> HookRun:
        if not self.to_loss:
            times = [
                run.seconds_to_target
                for other, run in before.items()
                if replace(other, hook=cell.hook) == cell and run.seconds_to_target is not None
            ]
            return measure(cell, limit_s=self.give_up * min(times) if times else None, tell=tell)
        if cell.lr is not None:
            return measure(cell, tell=tell, counted=True)
        rate = best_rate(cell.model, cell.hook, before)
        if rate is None:
            error = f"{cell.hook} ended with a loss at no learning rate of the grid"
            return HookRun(curve=[], steps_done=0, seconds=0.0, ended="error", error=error)
        limit_s = self.timed_seconds if is_timed(cell) else None
        run = measure(replace(cell, lr=rate), limit_s=limit_s, tell=tell, counted=True)
        return msgspec.structs.replace(run, lr=rate)

    def failed(self, figures: HookRun) -> bool:
        """Returns whether a run failed; in a race to a loss a run that diverges did not."""
        return figures.error is not None and not (self.to_loss and NonFiniteError.__name__ in figures.error)

    def outdated(self, cell: HookCell, figures: HookRun, before: Measured[HookCell, HookRun]) -> bool:
        """Returns whether a run failed, or was made at a learning rate that is no longer the best."""
        chosen = self.to_loss and cell.lr is None
        return self.failed(figures) or (chosen and figures.lr != best_rate(cell.model, cell.hook, before))

    def line(self, cell: HookCell, figures: HookRun) -> str:
        seconds, steps = figures.seconds, figures.steps_done
        named = f"{cell}, learning rate {cell.lr or figures.lr or 0:g}" if self.to_loss else str(cell)
        if figures.error is not None:
            return f"{named}: failed after {steps} steps: {last_line(figures.error)}"
        if self.to_loss and is_timed(cell):
            return f"{named}: {figures.seconds_per_step_mean or 0:.3f} s a step over {steps} steps"
        if self.to_loss:
            return f"{named}: {last_loss(figures):.3f} nats a byte, {seconds:.0f} s"
        how = {"target": "target", "limit": f"stopped at {self.give_up:g}× the best,", "steps": "target not reached"}
        return f"{named}: {how[figures.ended]} after {seconds:.1f} s and {steps} steps"

    def standings(self, measured: Measured[HookCell, HookRun]) -> list[Standing]:
        """Returns one row for each model, link and method."""
        return to_loss(measured, self.margin) if self.to_loss else to_accuracy(measured)

    def sections(self, measured: Measured[HookCell, HookRun]) -> dict[str, Any]:
        return {**super().sections(measured), "standings": self.standings(measured)}

    @property
    def goal(self) -> str:
        """The target as text."""
        return f"the loss of none + {self.margin:g}" if self.to_loss else f"{self.target_accuracy:.1%}"

    def tables(self, measured: Measured[HookCell, HookRun]) -> list[Table]:
        """Returns one table for each model and link."""
        rows, tables = self.standings(measured), []
        for model, link in dict.fromkeys((row.model, row.link) for row in rows):
            lines = [self._line(row) for row in rows if (row.model, row.link) == (model, link)]
            title = f"{model}, {self.ranks} ranks, {link}: to {self.goal}"
            tables.append(Table([*HEADER, "s a step", "computing", "sent a step", "CPU"], lines, title))
        return tables

    def _line(self, row: Standing) -> list[str]:
        """Returns a line of the table; `>` marks a lower bound, of a run that did not reach the target."""
        form, beside = (".3f", "+.3f") if self.to_loss else (".2%", "+.2%")

        def by_seed(seed: int) -> str:
            score = number_text(row.scores.get(seed), form)
            how = row.ended.get(seed)
            if how is None or how == "error":
                return score if how is None else "failed"
            return f"{score} in {'' if how == 'target' else '> '}{row.seconds[seed]:.1f} s"

        def size(nbytes: float | None) -> str:
            return "–" if nbytes is None else nbytes_text(nbytes)

        return [
            *(row.method, number_text(row.rate, "g"), ", ".join(map(by_seed, row.ended or row.scores)) or "failed"),
            *(number_text(row.score, form), number_text(row.beside_plain, beside)),
            *(number_text(row.steps_to_target, ".0f"), size(row.bytes_to_target)),
            *(number_text(row.seconds_to_target, ".1f"), number_text(row.of_best, ".2f")),
            *(number_text(row.seconds_per_step, ".3f"), number_text(row.compute_share, ".0%")),
            *(size(row.sent_bytes_per_step), number_text(row.cpu, ".2f", "×")),
        ]

    def chart(self, measured: Measured[HookCell, HookRun]) -> Chart | None:
        rows = [row for row in self.standings(measured) if any(row.curves)]
        what = "held-out loss (nats a byte)" if self.to_loss else "test accuracy"
        return draw(rows, what, None if self.to_loss else self.target_accuracy) if rows else None


def draw(rows: Sequence[Standing], score: str, target: float | None) -> Chart:
    """Returns one panel for each model and link: scores over seconds of training, and the target."""
    panels = []
    for model, link in dict.fromkeys((row.model, row.link) for row in rows):
        series = [
            Series(label=row.method, x=[x for x, _ in curve], y=[y for _, y in curve])
            for row in rows
            if (row.model, row.link) == (model, link)
            for curve in row.curves
        ]
        times = [x for each in series for x in each.x if isinstance(x, float) and x > 0]
        if target is not None and times:
            ends = [min(times), max(times)]
            series.append(Series(label=f"the target, {target:.1%}", x=ends, y=[target, target], role="reference"))
        panels.append(
            Panel(
                title=f"{model}, {link}",
                x_label="seconds of training",
                y_label=score,
                series=series,
                x_log=True,
            )
        )
    return Chart(name="race", caption=f"The {score} over the time of training.", panels=panels)
