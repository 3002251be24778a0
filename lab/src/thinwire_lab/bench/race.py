"""A race: which DDP hook brings a model to a test accuracy in the fewest seconds of training on a thin link.

All runners have the same model, weights, data order, batches and learning rates by step, so what differs is how long a
step takes and how many of them the target needs. Who needs a careful beginning says so in its name, as in
`3lc[s=1.75,start_step=50]`, and pays for its uncompressed steps on the clock. The clock stands still while rank 0
scores the model on a fixed part of the test set. A runner that has trained for several times the best time so far,
without the target, is stopped: its row says so, and its time is then a lower bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.presentation.charts import Chart
from thinwire.presentation.tables import Table
from thinwire_lab.bench import charts
from thinwire_lab.bench.harness import Measured, Tell
from thinwire_lab.bench.hook_cells import HookCell, hook
from thinwire_lab.bench.hook_runs import HookRun, last_line, measure
from thinwire_lab.bench.hooks import HooksBench
from thinwire_lab.bench.options import RaceOptions


@dataclass(frozen=True, kw_only=True)
class AccuracyStanding:
    """One hook on one model and link, of what has been run so far; by seed in the order of runs.

    Attributes:
        seconds: to the target, by seed; None where it was not reached.
        steps: to the target, by seed.
        trained_seconds: by seed; a lower bound where the target was not reached.
        ended: by seed, as in `HookRun`.
        median_seconds: to the target; None unless more than half of the seeds reached it, the others counting as slow.
        of_best_stock: the median over that of the best stock hook on the same model and link.
    """

    model: str
    link: str | None
    hook: str
    seconds: dict[int, float | None]
    steps: dict[int, int | None]
    trained_seconds: dict[int, float]
    ended: dict[int, str]
    median_seconds: float | None
    of_best_stock: float | None


@dataclass(kw_only=True)
class RaceBench(RaceOptions, HooksBench):
    """Seconds of training to a test accuracy, of every hook; the learning rate's schedule is as long as `steps`.

    Args:
        target_accuracy: to reach, 0 … 1.
        eval_every: steps between evaluations.
        eval_examples: evaluate on the first so many test examples.
        give_up: a runner is stopped after so many times the best time of its seed so far.
    """

    key_options = ("give_up",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.give_up >= 1:
            raise ConfigError(f"give_up={self.give_up}; a race needs 1 or more")

    def cell(self, model: str, link: str, seed: int, name: str) -> HookCell:
        return replace(super().cell(model, link, seed, name), target=self.target_accuracy)

    def clocked(self, cell: HookCell) -> HookCell:
        """Returns the run unchanged: uncompressed steps at a race's beginning are on the clock."""
        return cell

    def measure(self, cell: HookCell, before: Measured[HookCell, HookRun], tell: Tell) -> HookRun:
        times = [
            run.seconds_to_target
            for other, [run] in before.items()
            if replace(other, hook=cell.hook) == cell and run.seconds_to_target is not None
        ]
        limit_s = self.give_up * min(times) if times else None
        return measure(cell, limit_s=limit_s, tell=tell)

    def line(self, cell: HookCell, figures: HookRun) -> str:
        seconds, steps = figures.seconds, figures.steps_done
        how = {
            "target": f"target after {figures.seconds_to_target or 0:.1f} s and {steps} steps",
            "limit": f"stopped after {seconds:.1f} s, more than {self.give_up:g}× the best",
            "steps": f"target not reached in {steps} steps, {seconds:.1f} s",
            "error": f"failed after {steps} steps: {last_line(figures.error or '')}",
        }
        return f"{cell}: {how[figures.ended]}"

    def sections(self, measured: Measured[HookCell, HookRun]) -> dict[str, Any]:
        return {**super().sections(measured), "standings": standings(measured)}

    def tables(self, measured: Measured[HookCell, HookRun]) -> list[Table]:
        rows, tables = standings(measured), []
        for model, link in dict.fromkeys((row.model, row.link) for row in rows):
            lines = [self._line(row) for row in rows if (row.model, row.link) == (model, link)]
            title = f"{model} on {self.data}, {self.ranks} ranks, {link or 'unlimited'}: {self.target_accuracy:.1%}"
            tables.append(
                Table(["hook", "seconds by seed", "steps by seed", "median s", "of best stock"], lines, title)
            )
        return tables

    def notes(self, measured: Measured[HookCell, HookRun]) -> list[str]:
        return [*super().notes(measured), *auto_notes(standings(measured))]

    def _line(self, row: AccuracyStanding) -> list[str]:
        """A line of the table; `>` is a lower bound, of a run that was stopped or did not reach the target."""

        def seconds(seed: int) -> str:
            trained = row.trained_seconds[seed]
            return {
                "target": f"{row.seconds[seed] or 0:.1f}",
                "limit": f"> {trained:.1f} (stopped at {self.give_up:g}×)",
                "steps": f"> {trained:.1f} (not reached)",
                "error": "failed",
            }[row.ended[seed]]

        return [
            row.hook,
            ", ".join(map(seconds, row.ended)),
            ", ".join("–" if step is None else str(step) for step in row.steps.values()),
            "" if row.median_seconds is None else f"{row.median_seconds:.1f}",
            "" if row.of_best_stock is None else f"{row.of_best_stock:.2f}",
        ]

    def chart(self, measured: Measured[HookCell, HookRun]) -> Chart | None:
        curves = {cell: run.curve for cell, [run] in measured.items() if run.curve}
        return charts.race(curves) if curves else None


def auto_notes(rows: Sequence[AccuracyStanding]) -> list[str]:
    """Returns how `auto` stands beside the best fixed setting, uncompressed included, by model and link."""
    notes = []
    for row in (row for row in rows if hook(row.hook).chooses):
        others = [
            other
            for other in rows
            if (other.model, other.link) == (row.model, row.link) and not hook(other.hook).chooses
        ]
        best = min(others, key=lambda other: other.median_seconds or math.inf, default=None)
        if best is not None and best.median_seconds is not None and row.median_seconds is not None:
            share = row.median_seconds / best.median_seconds
            where = f"{row.model}, {row.link or 'unlimited'}"
            notes.append(f"{where}: {row.hook} takes {share:.2f} of the best fixed setting's time, {best.hook}'s")
    return notes


def standings(measured: Measured[HookCell, HookRun]) -> list[AccuracyStanding]:
    """Returns one row for each model, link and hook."""
    seeds: dict[tuple[str, str | None, str], dict[int, HookRun]] = {}
    for cell, [run] in measured.items():
        seeds.setdefault((cell.model, cell.link, cell.hook), {})[cell.seed] = run
    medians = {
        key: statistics.median(
            math.inf if run.seconds_to_target is None else run.seconds_to_target for run in runs.values()
        )
        for key, runs in seeds.items()
    }
    rows = []
    for key, runs in seeds.items():
        rivals = (value for other, value in medians.items() if other[:2] == key[:2] and not hook(other[2]).compresses)
        own, best = medians[key], min(rivals, default=math.inf)
        row = AccuracyStanding(
            model=key[0],
            link=key[1],
            hook=key[2],
            seconds={seed: run.seconds_to_target for seed, run in runs.items()},
            steps={seed: run.curve[-1].step if run.ended == "target" else None for seed, run in runs.items()},
            trained_seconds={seed: run.seconds for seed, run in runs.items()},
            ended={seed: run.ended for seed, run in runs.items()},
            median_seconds=own if math.isfinite(own) else None,
            of_best_stock=own / best if math.isfinite(own) and math.isfinite(best) else None,
        )
        rows.append(row)
    return rows
