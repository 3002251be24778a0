"""The results of a race: one standing for each model, link and method, compared with the other methods.

In a race to an accuracy every run trains on its link, and its clock counts. In a race to a loss a method's full runs
give the loss by step, and its timed run on a link gives the seconds of a step; the time is their product.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from msgspec import UnsetType

from thinwire_lab.bench.cells import HookCell
from thinwire_lab.bench.hook_runs import HookRun
from thinwire_lab.bench.names import hook
from thinwire_lab.jobs.grid import Measured

Points = list[tuple[float, float | None, float]]
"""Steps, bytes sent by a rank, and a score."""
Key = tuple[str, str, str]
"""Model, link and method."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One method on one model and link; medians over the seeds, None if missing.

    Attributes:
        scores: the last score by seed: a test accuracy, or a held-out loss in nats a byte.
        beside_plain: the median score minus that of `none`.
        seconds: seconds of training by seed, to the target if reached; otherwise a lower bound.
        of_best: the seconds to the target over those of the best method without a codec of ours.
        cpu: CPU seconds of a step over those of the same step without exchanges.
        curves: seconds and score of each seed, or of their median.
    """

    model: str
    link: str
    method: str
    rate: float | None = None
    scores: dict[int, float] = field(default_factory=dict)
    score: float | None = None
    beside_plain: float | None = None
    ended: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    steps_to_target: float | None = None
    bytes_to_target: float | None = None
    seconds_to_target: float | None = None
    of_best: float | None = None
    seconds_per_step: float | None = None
    sent_bytes_per_step: float | None = None
    compute_share: float | None = None
    cpu: float | None = None
    curves: list[list[tuple[float, float]]] = field(default_factory=list)


def to_accuracy(measured: Measured[HookCell, HookRun]) -> list[Standing]:
    """Returns one standing for each model, link and hook, from runs on their links."""
    seeds: dict[Key, dict[int, HookRun]] = {}
    for cell, run in measured.items():
        seeds.setdefault((cell.model, cell.link or "unlimited", cell.hook), {})[cell.seed] = run
    rows = []
    for (model, link, method), runs in seeds.items():
        reached = {seed: run for seed, run in runs.items() if run.seconds_to_target is not None}
        middle = statistics.median(math.inf if (s := run.seconds_to_target) is None else s for run in runs.values())
        scores = {seed: run.test_accuracy for seed, run in runs.items() if run.test_accuracy is not None}
        row = Standing(
            model=model,
            link=link,
            method=method,
            scores=scores,
            score=_median(list(scores.values())),
            ended={seed: run.ended for seed, run in runs.items()},
            seconds={seed: run.seconds_to_target or run.seconds for seed, run in runs.items()},
            steps_to_target=_median([run.curve[-1].step for run in reached.values()]),
            seconds_to_target=middle if math.isfinite(middle) else None,
            seconds_per_step=_median_of(runs.values(), lambda run: run.seconds_per_step),
            sent_bytes_per_step=_median_of(runs.values(), lambda run: run.sent_bytes_per_step),
            cpu=_median_of(runs.values(), _cpu),
            curves=[[(point.seconds, point.accuracy) for point in run.curve] for run in runs.values()],
        )
        rows.append(row)
    return _beside(rows)


def to_loss(measured: Measured[HookCell, HookRun], margin: float) -> list[Standing]:
    """Returns one standing for each model, link and method; the target is the loss of `none` plus a margin."""
    timed = {(cell.model, cell.hook, cell.link or "unlimited"): run for cell, run in measured.items() if is_timed(cell)}
    links = {model: dict.fromkeys(link for each, _, link in timed if each == model) for model, _, _ in timed}
    rows: list[Standing] = []
    plain = {model: _score(full_runs(model, "none", measured)) for model, _, _ in timed}
    targets = {model: loss + margin for model, loss in plain.items() if loss is not None and math.isfinite(loss)}
    for model, method in dict.fromkeys((cell.model, cell.hook) for cell in measured):
        full = full_runs(model, method, measured)
        points = median_curve(list(full.values()))
        for link in links.get(model, ("unlimited",)):
            run = timed.get((model, method, link))
            step_s = None if run is None else run.seconds_per_step_mean
            row = Standing(
                model=model,
                link=link,
                method=method,
                rate=best_rate(model, method, measured),
                scores={seed: last_loss(run) for seed, run in full.items()},
                score=_score(full),
                seconds_per_step=step_s,
                sent_bytes_per_step=_median_of(full.values(), lambda run: run.sent_bytes_per_step),
                compute_share=None if run is None else run.compute_share,
                cpu=_median_of(full.values(), _cpu),
                curves=[[(steps * step_s, loss) for steps, _, loss in points]] if step_s and points else [],
            )
            rows.append(_reaching(row, points, targets.get(model)))
    return _beside(rows)


def _reaching(row: Standing, points: Points, target: float | None) -> Standing:
    """Returns the standing with its steps, bytes and seconds to the target."""
    found = None if target is None else reached(target, points)
    if found is None:
        return row
    steps, nbytes = found
    seconds = None if row.seconds_per_step is None else steps * row.seconds_per_step
    return replace(row, steps_to_target=steps, bytes_to_target=nbytes, seconds_to_target=seconds)


def _beside(rows: Sequence[Standing]) -> list[Standing]:
    """Returns the standings with comparisons on the same model and link."""
    compared = []
    for row in rows:
        same = [other for other in rows if (other.model, other.link) == (row.model, row.link)]
        plain = next((other.score for other in same if other.method == "none"), None)
        rivals = [other.seconds_to_target for other in same if not hook(other.method).compresses]
        best = min((each for each in rivals if each is not None), default=None)
        share = None if row.seconds_to_target is None or not best else row.seconds_to_target / best
        beside = None if row.score is None or plain is None or not math.isfinite(plain) else row.score - plain
        compared.append(replace(row, of_best=share, beside_plain=beside))
    return compared


def is_timed(cell: HookCell) -> bool:
    """Returns whether a run only measures seconds per step."""
    return cell.eval_every == 0


def last_loss(run: HookRun) -> float:
    """Returns the last loss; infinity if it is missing or NaN."""
    loss = run.test_loss
    return math.inf if run.error is not None or loss is None or math.isnan(loss) else loss


def best_rate(model: str, method: str, measured: Measured[HookCell, HookRun]) -> float | None:
    """Returns the learning rate of the grid with the lowest last loss; None if no run ended with a loss."""
    grid = tried(model, method, measured)
    best = min(grid, key=lambda rate: grid[rate], default=None)
    return None if best is None or math.isinf(grid[best]) else best


def tried(model: str, method: str, measured: Measured[HookCell, HookRun]) -> dict[float, float]:
    """Returns the last losses of a method by learning rate, of the first seed."""
    return {
        cell.lr: last_loss(run)
        for cell, run in measured.items()
        if (cell.model, cell.hook) == (model, method) and cell.lr is not None
    }


def beyond(grid: Collection[float], best: float | None, most: int) -> float | None:
    """Returns the next learning rate beyond the edge at which the best stands; None if the best lies inside.

    Example:
        >>> beyond([2e-3, 4e-3], 4e-3, most=8), beyond([2e-3, 4e-3], 2e-3, most=8)
        (0.008, 0.001)
        >>> beyond([2e-3, 4e-3, 8e-3], 4e-3, most=8) is beyond([4e-3], 4e-3, most=8) is None
        True
    """
    rates = sorted(grid)
    if best is None or len(rates) < 2 or len(rates) >= most or best not in (rates[0], rates[-1]):
        return None
    inner = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / inner:.4g}")


def full_runs(model: str, method: str, measured: Measured[HookCell, HookRun]) -> dict[int, HookRun]:
    """Returns the full runs at the best learning rate, by seed."""
    rate = best_rate(model, method, measured)
    return {
        cell.seed: run
        for cell, run in measured.items()
        if (cell.model, cell.hook) == (model, method) and not is_timed(cell) and rate and rate in (cell.lr, run.lr)
    }


def median_curve(runs: Sequence[HookRun]) -> Points:
    """Returns the medians over all seeds where they are finite; a failed seed's loss counts as infinite."""
    points: Points = []
    failed = [math.inf for run in runs if run.error is not None]
    for at in zip(*(run.curve for run in runs if run.error is None), strict=False):
        losses = [point.loss for point in at if not isinstance(point.loss, UnsetType)]
        sent = [point.sent_bytes for point in at if not isinstance(point.sent_bytes, UnsetType)]
        if len(losses) == len(at):
            middle = statistics.median([*(math.inf if math.isnan(loss) else loss for loss in losses), *failed])
            points += [(at[0].step, _median(sent), middle)] if math.isfinite(middle) else []
    return points


def reached(target: float, points: Points) -> tuple[float, float | None] | None:
    """Returns steps and bytes until the loss first reaches the target, interpolated between two evaluations."""
    if points and points[0][2] <= target:
        return points[0][0], points[0][1]
    for (before, sent, high), (after, sent_after, low) in pairwise(points):
        if low <= target < high:
            share = (high - target) / (high - low)
            nbytes = None if sent is None or sent_after is None else sent + (sent_after - sent) * share
            return before + (after - before) * share, nbytes
    return None


def _score(runs: Mapping[int, HookRun]) -> float | None:
    return _median([last_loss(run) for run in runs.values()])


def _cpu(run: HookRun) -> float | None:
    used, alone = run.cpu_seconds_per_step, run.cpu_seconds_alone
    return used / alone if used and alone else None


def _median_of(runs: Iterable[HookRun], figure: Callable[[HookRun], float | None]) -> float | None:
    return _median([value for run in runs if (value := figure(run)) is not None])


def _median(values: Sequence[float]) -> float | None:
    return float(statistics.median(values)) if values else None
