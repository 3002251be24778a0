"""A race to a held-out loss: language models, every method at its own best rate, on links of many rates.

A link changes how long a step takes and not what it computes. So a method trains in full on links without a limit,
which gives its loss by step and by bytes at the interface; a shorter run on each thin link gives its seconds per step
(3LC §4.3), and the product is its loss by wall time. At the first seed it runs at every rate of the grid; at the rate
with the lowest last loss it then runs with the other seeds and on the links. A timed run has whole periods between
exchanges, and its end waits for the last answer; it has no uncompressed beginning, so no method here begins late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from thinwire.errors import ConfigError, NonFiniteError
from thinwire.presentation.charts import Chart
from thinwire.presentation.tables import Table
from thinwire.quantities import nbytes_text, number_text
from thinwire_lab.bench import charts
from thinwire_lab.bench.harness import Measured, Tell
from thinwire_lab.bench.hook_cells import WARMUP, HookCell, hook, timed
from thinwire_lab.bench.hook_runs import HookRun, last_line, measure
from thinwire_lab.bench.hooks import HooksBench
from thinwire_lab.bench.loss_standings import LossStanding, best_rate, grid_of, is_timed, last_loss, standings
from thinwire_lab.bench.options import LossRaceOptions


@dataclass(kw_only=True)
class LossRace(LossRaceOptions, HooksBench):
    """Held-out loss of every method against steps, bytes and seconds.

    Args:
        rates: largest learning rates to try each method with.
        eval_every: steps between evaluations.
        eval_examples: evaluate on so many windows of the held-out text, evenly spaced.
        timed_steps: of a run on a thin link, at least; it has two exchanges or more.
        timed_seconds: a run on a thin link that has taken so long is ended, after a whole period between exchanges.
        margin: the target is the loss of `none` plus so many nats a byte.

    Raises:
        ConfigError: nothing to measure, a rate that cannot be, or a method whose steps on links would be uncompressed.
    """

    key_options = ("timed_seconds",)

    def __post_init__(self) -> None:
        if not self.rates or not all(math.isfinite(rate) and rate > 0 for rate in self.rates):
            raise ConfigError(f"rates {list(self.rates)}; a race needs one or more, all of them positive")
        super().__post_init__()
        for name in self.hooks:
            if hook(name).start_step > WARMUP:
                raise ConfigError(
                    f"hook {name!r}: start_step: a loss by wall time has one number of seconds for all steps on a "
                    "link, and uncompressed ones take another; leave it out"
                )

    def cells(self) -> list[HookCell]:
        """The full runs of each method come before those on thin links; a rate of None is the best of the grid."""
        return [each for model in self.models for name in self.hooks for each in self._of(model, name)]

    def _of(self, model: str, name: str) -> list[HookCell]:
        full = self.cell(model, "none", self.seed, name)
        seeds = range(self.seed + 1, self.seed + self.seeds)
        short = timed(replace(full, steps=self.timed_steps, eval_every=0, eval_examples=1), periods=2)
        links = [self.cell(model, link, self.seed, name).link for link in self.links]
        return [
            *(replace(full, lr=rate) for rate in dict.fromkeys(self.rates)),
            *(replace(full, lr=None, seed=seed) for seed in seeds),
            *(replace(short, lr=None, link=link) for link in dict.fromkeys(links)),
        ]

    def key(self, cell: HookCell, number: int) -> dict[str, Any]:
        """As of any benchmark; a full run is the same whatever the limit of those on links is."""
        key = super().key(cell, number)
        return key if is_timed(cell) else key | {"timed_seconds": LossRaceOptions.timed_seconds}

    def measure(self, cell: HookCell, before: Measured[HookCell, HookRun], tell: Tell) -> HookRun:
        limit_s = self.timed_seconds if cell.link else None
        if cell.lr is not None:
            return measure(cell, tell=tell, counted=True)
        rate = best_rate(grid_of(cell.model, cell.hook, before))
        if rate is None:
            error = f"{cell.hook} ended with a loss at no rate of the grid"
            return HookRun(curve=[], steps_done=0, seconds=0.0, ended="error", error=error)
        run = measure(replace(cell, lr=rate), limit_s=limit_s, tell=tell, counted=True)
        return msgspec.structs.replace(run, lr=rate)

    def failed(self, figures: HookRun) -> bool:
        """A rate at which training diverges is an outcome."""
        return figures.error is not None and NonFiniteError.__name__ not in figures.error

    def outdated(self, cell: HookCell, figures: HookRun, before: Measured[HookCell, HookRun]) -> bool:
        """A run at the best rate is to be made again where another rate is the best one now.

        So is one that a limit of time has ended in the middle of a period, as older versions did.
        """
        best = best_rate(grid_of(cell.model, cell.hook, before))
        torn = figures.ended == "limit" and figures.steps_done % hook(cell.hook).period != 0
        return self.failed(figures) or torn or (cell.lr is None and figures.lr != best)

    def line(self, cell: HookCell, figures: HookRun) -> str:
        rate = f"rate {cell.lr or figures.lr or 0:g}"
        if figures.error is not None:
            return f"{cell}, {rate}: failed: {last_line(figures.error)}"
        if is_timed(cell):
            return f"{cell}, {rate}: {figures.seconds_per_step_mean or 0:.3f} s a step over {figures.steps_done} steps"
        sent = figures.sent_bytes_per_step
        told = "" if sent is None else f", {nbytes_text(sent)} a step and rank"
        return f"{cell}, {rate}: {last_loss(figures):.3f} nats a byte{told}, {figures.seconds:.0f} s"

    def sections(self, measured: Measured[HookCell, HookRun]) -> dict[str, Any]:
        return {**super().sections(measured), "standings": standings(measured, self.margin)}

    def tables(self, measured: Measured[HookCell, HookRun]) -> list[Table]:
        """Two for each model: how low the loss gets and what is sent, and seconds to the target by link."""
        rows, tables = standings(measured, self.margin), []
        for model in dict.fromkeys(row.model for row in rows):
            mine = [row for row in rows if row.model == model]
            header = ["method", "rate", "nats a byte by seed", "median", "above none", "sent a step", "less", "CPU"]
            title = f"{model}, {self.ranks} ranks, {self.steps} steps"
            tables.append(Table(header, [_loss_line(row) for row in mine], title))
            links = list(dict.fromkeys(link for row in mine for link in row.seconds_per_step))
            header = ["method", "steps", "bytes", *(f"{link}: s a step, computing, s, of best other" for link in links)]
            title = f"{model}: to the loss of none + {self.margin:g}"
            tables.append(Table(header, [_time_line(row, links) for row in mine], title))
        return tables

    def chart(self, measured: Measured[HookCell, HookRun]) -> Chart | None:
        curves: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
        for row in standings(measured, self.margin):
            sent = [(nbytes, loss) for _, nbytes, loss in row.curve if nbytes is not None]
            if sent:
                curves.setdefault((row.model, "bytes sent by a rank"), {})[row.method] = sent
            for link, seconds in row.seconds_per_step.items():
                by_time = [(step * seconds, loss) for step, _, loss in row.curve]
                if by_time:
                    curves.setdefault((row.model, f"seconds at {link}"), {})[row.method] = by_time
        return charts.loss_race(curves) if curves else None


def _loss_line(row: LossStanding) -> list[str]:
    return [
        row.method,
        number_text(row.rate, "g"),
        ", ".join(f"{loss:.3f}" for loss in row.losses.values()) or "failed",
        number_text(row.median_loss, ".3f"),
        number_text(row.above_plain, "+.3f"),
        "–" if row.sent_bytes_per_step is None else nbytes_text(row.sent_bytes_per_step),
        number_text(row.less, ".1f", "×"),
        number_text(row.cpu, ".2f", "×"),
    ]


def _time_line(row: LossStanding, links: Sequence[str]) -> list[str]:
    cells = [
        f"{number_text(row.seconds_per_step.get(link), '.3f')}, {number_text(row.compute_share.get(link), '.0%')}, "
        f"{number_text(row.seconds_to_target.get(link), '.0f')}, "
        f"{number_text(row.of_best_other.get(link), '.2f')}"
        for link in links
    ]
    nbytes = "–" if row.bytes_to_target is None else nbytes_text(row.bytes_to_target)
    return [row.method, number_text(row.steps_to_target, ".0f"), nbytes, *cells]
