"""A race to a held-out loss: language models, every method at its own best rate, on links of many rates.

A link changes how long a step takes and not what it computes. So a method trains in full on links without a limit,
which gives its loss by step and by bytes at the interface; a shorter run on each thin link gives its seconds per step
(3LC §4.3), and the product is its loss by wall time. At the first seed it runs at every rate of the grid; at the rate
with the lowest last loss it then runs with the other seeds and on the links. A timed run has whole periods between
exchanges, and its end waits for the last answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UnsetType

from thinwire.bench.authors import WORKS, identify
from thinwire.bench.charts import draw_loss_race
from thinwire.bench.harness import Measured, Tell
from thinwire.bench.hook_cells import Cell, hook
from thinwire.bench.hooks import HookRun, HooksBench, last_line, measure
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.jobs.tables import Table, nbytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

RACERS = (
    *("none", "bf16", "powersgd-1", "powersgd-2", "powersgd-4", "3lc[s=1.0]"),
    *("update", "local-sgd[h=4]", "diloco[h=30]", "diloco[h=30,codec=fp32]"),
)
"""Who runs unless told otherwise: torch's hooks, ours, and local updates with and without a codec."""

RATES = (2e-3, 4e-3, 8e-3)
WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One method on one model, of what has been run so far; medians over the seeds, None where they are missing.

    Attributes:
        method: a hook or a design.
        rate: the best of the grid.
        rates: the last loss at every rate of the grid, with the first seed.
        losses: the last loss by seed, at the best rate, in nats a byte.
        above_plain: the median loss above that of `none`.
        sent_bytes_per_step: that left a rank, as the kernel counted them, headers included.
        less: how many times less than `none` sends.
        steps_to_target: until the loss of `none` plus the margin.
        bytes_to_target: that left a rank until then.
        seconds_per_step: by link.
        compute_share: by link, what exchanges left of the steps' time, 0 … 1; of local updates alone.
        cpu: seconds of a step over those of the same step without exchanges; the median of the full runs.
        seconds_to_target: by link.
        of_best_other: by link, the seconds to the target over those of the best method without a codec of ours.
        curve: step, bytes that left a rank, and loss.
    """

    model: str
    method: str
    rate: float | None
    rates: dict[float, float]
    losses: dict[int, float]
    median_loss: float | None
    above_plain: float | None
    sent_bytes_per_step: float | None
    less: float | None
    steps_to_target: float | None
    bytes_to_target: float | None
    seconds_per_step: dict[str, float]
    compute_share: dict[str, float]
    cpu: float | None
    seconds_to_target: dict[str, float | None]
    of_best_other: dict[str, float | None]
    curve: list[tuple[int, float | None, float]]


@dataclass(kw_only=True)
class LossRace(HooksBench):
    """Held-out loss of every method against steps, bytes and seconds.

    Args:
        rates: largest learning rates to try each method with.
        eval_every: steps between evaluations.
        eval_examples: evaluate on so many windows of the held-out text, evenly spaced.
        timed_steps: of a run on a thin link, at least; it has two exchanges or more.
        timed_seconds: a run on a thin link that has taken so long is ended.
        margin: the target is the loss of `none` plus so many nats a byte.
        files: other people's optimizers, by what their hooks call the file.

    Raises:
        ConfigError: nothing to measure, or a rate that cannot be.
    """

    models: Sequence[str] = ("byte-transformer-1m",)
    hooks: Sequence[str] = RACERS
    links: Sequence[str] = ("10mbit", "100mbit")
    data: str = "python-text"
    rates: Sequence[float] = RATES
    steps: int = 1000
    eval_every: int = 50
    eval_examples: int = 512
    timed_steps: int = 40
    timed_seconds: float = 120.0
    margin: float = 0.1
    files: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rates or not all(math.isfinite(rate) and rate > 0 for rate in self.rates):
            raise ConfigError(f"rates {list(self.rates)}; a race needs one or more, all of them positive")
        super().__post_init__()

    def cells(self) -> list[Cell]:
        """The full runs of each method come before those on thin links; a rate of None is the best of the grid."""
        return [each for model in self.models for name in self.hooks for each in self._of(model, name)]

    def _of(self, model: str, name: str) -> list[Cell]:
        full = self.cell(model, "none", self.seed, name)
        seeds = range(self.seed + 1, self.seed + self.seeds)
        period = hook(name).period
        timed = replace(
            full,
            steps=max(2, -(-self.timed_steps // period)) * period,
            warmup=-(-WARMUP // period) * period,
            eval_every=0,
            eval_examples=1,
        )
        links = [self.cell(model, link, self.seed, name).link for link in self.links]
        return [
            *(replace(full, lr=rate) for rate in dict.fromkeys(self.rates)),
            *(replace(full, lr=None, seed=seed) for seed in seeds),
            *(replace(timed, lr=None, link=link) for link in dict.fromkeys(links)),
        ]

    def authors(self, name: str) -> str | None:
        return identify(hook(name).id, self.files)

    def measure(self, cell: Cell, before: Measured[Cell, HookRun], tell: Tell) -> HookRun:
        limit_s = self.timed_seconds if cell.link else None
        file = self.files.get(WORKS[hook(cell.hook).id].file or "") if cell.authors else None
        if cell.lr is not None:
            return measure(cell, tell=tell, counted=True, authors=file)
        rate = _best_rate(_grid(cell.model, cell.hook, before))
        if rate is None:
            error = f"{cell.hook} ended with a loss at no rate of the grid"
            return HookRun(curve=[], steps_done=0, seconds=0.0, ended="error", error=error)
        run = measure(replace(cell, lr=rate), limit_s=limit_s, tell=tell, counted=True, authors=file)
        return msgspec.structs.replace(run, lr=rate)

    def failed(self, figures: HookRun) -> bool:
        """A rate at which training diverges is an outcome."""
        return figures.error is not None and NonFiniteError.__name__ not in figures.error

    def line(self, cell: Cell, figures: HookRun) -> str:
        rate = f"rate {cell.lr or figures.lr or 0:g}"
        if figures.error is not None:
            return f"{cell}, {rate}: failed: {last_line(figures.error)}"
        if _is_timed(cell):
            return f"{cell}, {rate}: {figures.seconds_per_step_mean or 0:.3f} s a step over {figures.steps_done} steps"
        sent = figures.sent_bytes_per_step
        told = "" if sent is None else f", {nbytes_text(sent)} a step and rank"
        return f"{cell}, {rate}: {_loss(figures):.3f} nats a byte{told}, {figures.seconds:.0f} s"

    def sections(self, measured: Measured[Cell, HookRun]) -> dict[str, Any]:
        return {**super().sections(measured), "standings": standings(measured, self.margin)}

    def tables(self, measured: Measured[Cell, HookRun]) -> list[Table]:
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

    def chart(self, measured: Measured[Cell, HookRun]) -> Picture | None:
        curves: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
        for row in standings(measured, self.margin):
            sent = [(nbytes, loss) for _, nbytes, loss in row.curve if nbytes is not None]
            if sent:
                curves.setdefault((row.model, "bytes sent by a rank"), {})[row.method] = sent
            for link, seconds in row.seconds_per_step.items():
                by_time = [(step * seconds, loss) for step, _, loss in row.curve]
                if by_time:
                    curves.setdefault((row.model, f"seconds at {link}"), {})[row.method] = by_time
        return draw_loss_race(curves) if curves else None


def standings(measured: Measured[Cell, HookRun], margin: float) -> list[Standing]:
    """Returns one row for each model and method, in the order of the runs."""
    keys = dict.fromkeys((cell.model, cell.hook) for cell in measured)
    alone = {key: _standing(*key, measured) for key in keys}
    return [_compared(row, alone, margin) for row in alone.values()]


def _standing(model: str, method: str, measured: Measured[Cell, HookRun]) -> Standing:
    grid = _grid(model, method, measured)
    rate = _best_rate(grid)
    full = _full_runs(model, method, rate, measured)
    sent = [run.sent_bytes_per_step for run in full.values() if run.sent_bytes_per_step is not None]
    timed = {
        cell.link or "unlimited": run
        for cell, [run] in measured.items()
        if (cell.model, cell.hook) == (model, method) and _is_timed(cell)
    }
    cpu = [
        run.cpu_seconds_per_step / run.cpu_seconds_alone
        for run in full.values()
        if run.cpu_seconds_per_step and run.cpu_seconds_alone
    ]
    return Standing(
        model=model,
        method=method,
        rate=rate,
        rates={lr: _loss(run) for lr, run in grid.items()},
        losses={seed: _loss(run) for seed, run in full.items()},
        median_loss=statistics.median(map(_loss, full.values())) if full else None,
        above_plain=None,
        sent_bytes_per_step=statistics.median(sent) if sent else None,
        less=None,
        steps_to_target=None,
        bytes_to_target=None,
        seconds_per_step={
            link: run.seconds_per_step_mean for link, run in timed.items() if run.seconds_per_step_mean is not None
        },
        compute_share={link: run.compute_share for link, run in timed.items() if run.compute_share is not None},
        cpu=statistics.median(cpu) if cpu else None,
        seconds_to_target={},
        of_best_other={},
        curve=_median_curve(list(full.values())),
    )


def _compared(row: Standing, rows: Mapping[tuple[str, str], Standing], margin: float) -> Standing:
    """Returns a row with what compares it to the other methods on the same model."""
    mine = [other for other in rows.values() if other.model == row.model]
    plain = rows.get((row.model, "none"))
    if plain is None or plain.median_loss is None:
        return row
    target = plain.median_loss + margin
    seconds = {link: _seconds_to(target, row, link) for link in row.seconds_per_step}
    rivals = {
        link: [_seconds_to(target, other, link) for other in mine if not hook(other.method).compresses]
        for link in seconds
    }
    best = {link: min((each for each in times if each is not None), default=None) for link, times in rivals.items()}
    steps = _steps_to(target, row.curve)
    sent, plain_sent = row.sent_bytes_per_step, plain.sent_bytes_per_step
    return replace(
        row,
        above_plain=None if row.median_loss is None else row.median_loss - plain.median_loss,
        less=plain_sent / sent if sent and plain_sent else None,
        steps_to_target=steps,
        bytes_to_target=None if steps is None or sent is None else steps * sent,
        seconds_to_target=seconds,
        of_best_other={link: _ratio(seconds[link], best[link]) for link in seconds},
    )


def _is_timed(cell: Cell) -> bool:
    return cell.eval_every == 0


def _loss(run: HookRun) -> float:
    """The last loss; infinite where there is none, or it is no number."""
    loss = run.test_loss
    return math.inf if run.error is not None or loss is None or math.isnan(loss) else loss


def _grid(model: str, method: str, measured: Measured[Cell, HookRun]) -> dict[float, HookRun]:
    """The full runs with the first seed, by rate."""
    return {
        cell.lr: run
        for cell, [run] in measured.items()
        if (cell.model, cell.hook) == (model, method) and cell.lr is not None
    }


def _best_rate(grid: Mapping[float, HookRun]) -> float | None:
    best = min(grid, key=lambda rate: _loss(grid[rate]), default=None)
    return None if best is None or math.isinf(_loss(grid[best])) else best


def _full_runs(model: str, method: str, rate: float | None, measured: Measured[Cell, HookRun]) -> dict[int, HookRun]:
    """The full runs at the best rate, by seed."""
    return {
        cell.seed: run
        for cell, [run] in measured.items()
        if (cell.model, cell.hook) == (model, method)
        and not _is_timed(cell)
        and rate is not None
        and rate in (cell.lr, run.lr)
    }


def _median_curve(runs: Sequence[HookRun]) -> list[tuple[int, float | None, float]]:
    """Step, bytes sent and loss where every seed was scored."""
    points = []
    for at in zip(*(run.curve for run in runs if run.error is None), strict=False):
        losses = [point.loss for point in at if not isinstance(point.loss, UnsetType)]
        sent = [point.sent_bytes for point in at if not isinstance(point.sent_bytes, UnsetType)]
        if len(losses) == len(at):
            points.append((at[0].step, statistics.median(sent) if sent else None, statistics.median(losses)))
    return points


def _steps_to(target: float, curve: Sequence[tuple[int, float | None, float]]) -> float | None:
    """After how many steps the loss first was at the target, on a straight line between two evaluations."""
    if curve and curve[0][2] <= target:
        return float(curve[0][0])
    for (before, _, high), (after, _, low) in pairwise(curve):
        if low <= target < high:
            return before + (after - before) * (high - target) / (high - low)
    return None


def _seconds_to(target: float, row: Standing, link: str) -> float | None:
    steps, seconds = _steps_to(target, row.curve), row.seconds_per_step.get(link)
    return None if steps is None or seconds is None else steps * seconds


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _loss_line(row: Standing) -> list[str]:
    return [
        row.method,
        _text(row.rate, "{:g}"),
        ", ".join(f"{loss:.3f}" for loss in row.losses.values()) or "failed",
        _text(row.median_loss, "{:.3f}"),
        _text(row.above_plain, "{:+.3f}"),
        "–" if row.sent_bytes_per_step is None else nbytes_text(row.sent_bytes_per_step),
        _text(row.less, "{:.1f}×"),
        _text(row.cpu, "{:.2f}×"),
    ]


def _time_line(row: Standing, links: Sequence[str]) -> list[str]:
    cells = [
        f"{_text(row.seconds_per_step.get(link), '{:.3f}')}, {_text(row.compute_share.get(link), '{:.0%}')}, "
        f"{_text(row.seconds_to_target.get(link), '{:.0f}')}, "
        f"{_text(row.of_best_other.get(link), '{:.2f}')}"
        for link in links
    ]
    nbytes = "–" if row.bytes_to_target is None else nbytes_text(row.bytes_to_target)
    return [row.method, _text(row.steps_to_target, "{:.0f}"), nbytes, *cells]


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
