"""What the runs of a race to a loss come to: each method at its best rate, and beside the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from msgspec import UnsetType

from thinwire_lab.bench.harness import Measured
from thinwire_lab.bench.hook_cells import HookCell, hook
from thinwire_lab.bench.hook_runs import HookRun


@dataclass(frozen=True, kw_only=True)
class LossStanding:
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
        bytes_to_target: that left a rank until then, as counted at the evaluations before and after.
        seconds_per_step: by link.
        compute_share: by link, what exchanges left of the steps' time, 0 … 1; of local updates alone.
        cpu: seconds of a step over those of the same step without exchanges; the median of the full runs.
        seconds_to_target: by link.
        of_best_other: by link, the seconds to the target over those of the best method without a codec of ours.
        curve: step, bytes that left a rank, and loss; of a seed that failed the loss counts as infinite.
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


def standings(measured: Measured[HookCell, HookRun], margin: float) -> list[LossStanding]:
    """Returns one row for each model and method, in the order of the runs."""
    keys = dict.fromkeys((cell.model, cell.hook) for cell in measured)
    alone = {key: _standing(*key, measured) for key in keys}
    return [_compared(row, alone, margin) for row in alone.values()]


def _standing(model: str, method: str, measured: Measured[HookCell, HookRun]) -> LossStanding:
    grid = grid_of(model, method, measured)
    rate = best_rate(grid)
    full = _full_runs(model, method, rate, measured)
    sent = [run.sent_bytes_per_step for run in full.values() if run.sent_bytes_per_step is not None]
    timed = {
        cell.link or "unlimited": run
        for cell, [run] in measured.items()
        if (cell.model, cell.hook) == (model, method) and is_timed(cell)
    }
    cpu = [
        run.cpu_seconds_per_step / run.cpu_seconds_alone
        for run in full.values()
        if run.cpu_seconds_per_step and run.cpu_seconds_alone
    ]
    return LossStanding(
        model=model,
        method=method,
        rate=rate,
        rates={lr: last_loss(run) for lr, run in grid.items()},
        losses={seed: last_loss(run) for seed, run in full.items()},
        median_loss=statistics.median(map(last_loss, full.values())) if full else None,
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


def _compared(row: LossStanding, rows: Mapping[tuple[str, str], LossStanding], margin: float) -> LossStanding:
    """Returns a row with what compares it to the other methods on the same model."""
    mine = [other for other in rows.values() if other.model == row.model]
    plain = rows.get((row.model, "none"))
    if plain is None or plain.median_loss is None or not math.isfinite(plain.median_loss):
        return row
    target = plain.median_loss + margin
    seconds = {link: _seconds_to(target, row, link) for link in row.seconds_per_step}
    rivals = {
        link: [_seconds_to(target, other, link) for other in mine if not hook(other.method).compresses]
        for link in seconds
    }
    best = {link: min((each for each in times if each is not None), default=None) for link, times in rivals.items()}
    reached = _reached(target, row.curve)
    sent, plain_sent = row.sent_bytes_per_step, plain.sent_bytes_per_step
    return replace(
        row,
        above_plain=None if row.median_loss is None else row.median_loss - plain.median_loss,
        less=plain_sent / sent if sent and plain_sent else None,
        steps_to_target=None if reached is None else reached[0],
        bytes_to_target=None if reached is None else reached[1],
        seconds_to_target=seconds,
        of_best_other={link: _ratio(seconds[link], best[link]) for link in seconds},
    )


def is_timed(cell: HookCell) -> bool:
    """Whether a run is one that only its seconds per step are wanted of."""
    return cell.eval_every == 0


def last_loss(run: HookRun) -> float:
    """The last loss; infinite where there is none, or it is no number."""
    loss = run.test_loss
    return math.inf if run.error is not None or loss is None or math.isnan(loss) else loss


def grid_of(model: str, method: str, measured: Measured[HookCell, HookRun]) -> dict[float, HookRun]:
    """The full runs with the first seed, by rate."""
    return {
        cell.lr: run
        for cell, [run] in measured.items()
        if (cell.model, cell.hook) == (model, method) and cell.lr is not None
    }


def best_rate(grid: Mapping[float, HookRun]) -> float | None:
    """Returns the rate with the lowest last loss; None where no run of the grid ended with one."""
    best = min(grid, key=lambda rate: last_loss(grid[rate]), default=None)
    return None if best is None or math.isinf(last_loss(grid[best])) else best


def _full_runs(
    model: str, method: str, rate: float | None, measured: Measured[HookCell, HookRun]
) -> dict[int, HookRun]:
    """The full runs at the best rate, by seed."""
    return {
        cell.seed: run
        for cell, [run] in measured.items()
        if (cell.model, cell.hook) == (model, method)
        and not is_timed(cell)
        and rate is not None
        and rate in (cell.lr, run.lr)
    }


def _median_curve(runs: Sequence[HookRun]) -> list[tuple[int, float | None, float]]:
    """Step, bytes sent and loss where every seed was scored, and the median of their losses is finite."""
    points: list[tuple[int, float | None, float]] = []
    failed = [math.inf for run in runs if run.error is not None]  # as in the median of the last losses
    for at in zip(*(run.curve for run in runs if run.error is None), strict=False):
        losses = [point.loss for point in at if not isinstance(point.loss, UnsetType)]
        sent = [point.sent_bytes for point in at if not isinstance(point.sent_bytes, UnsetType)]
        if len(losses) == len(at):
            middle = statistics.median([*(math.inf if math.isnan(loss) else loss for loss in losses), *failed])
            points += [(at[0].step, statistics.median(sent) if sent else None, middle)] if math.isfinite(middle) else []
    return points


def _reached(target: float, curve: Sequence[tuple[int, float | None, float]]) -> tuple[float, float | None] | None:
    """Steps and bytes until the loss first was at the target, on a straight line between two evaluations."""
    if curve and curve[0][2] <= target:
        return float(curve[0][0]), curve[0][1]
    for (before, sent, high), (after, sent_after, low) in pairwise(curve):
        if low <= target < high:
            share = (high - target) / (high - low)
            nbytes = None if sent is None or sent_after is None else sent + (sent_after - sent) * share
            return before + (after - before) * share, nbytes
    return None


def _seconds_to(target: float, row: LossStanding, link: str) -> float | None:
    reached, seconds = _reached(target, row.curve), row.seconds_per_step.get(link)
    return None if reached is None or seconds is None else reached[0] * seconds


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
