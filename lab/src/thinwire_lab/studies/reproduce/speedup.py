"""Linear speed-up in the number of workers, the claim of DoubleSqueeze's corollary 2: steps to a loss, by workers.

Each worker keeps its batch, and the learning rate grows with the number of workers. The control is a single worker at
the learning rate of eight: long steps with the noise of one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from thinwire.presentation.charts import Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.reproduce.entry import Found, Scale, Shown, chart, scaled
from thinwire_lab.studies.reproduce.iteration_times import SGD, PlainCell

METHODS = ("DoubleSqueeze 1-bit", "DoubleSqueeze top-k", SGD)
WORKERS: dict[Scale, Sequence[int]] = {"tiny": (1, 2), "quick": (1, 2, 4, 8), "full": (1, 2, 4, 8)}
BATCH = 4
LR_OF_ONE = 0.0125  # eight times this is a stable rate of all methods
TARGET = 0.25  # loss in nats, far above the final one, so that every schedule still has its initial learning rate
WINDOW = 1024  # examples of a mean loss

_EXAMPLES: dict[Scale, int] = {"tiny": 32, "quick": 12_000, "full": 24_000}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 1, "full": 3}
_SCALED = (
    "The paper proves it and has no figure. The theorem bounds the mean squared gradient; the training loss stands for "
    "it. A perceptron on the digits is an easy case."
)


def cells(scale: Scale) -> list[PlainCell]:
    """Returns the runs, with equal numbers of examples for all numbers of workers, and the control."""
    rates = [(each, each) for each in WORKERS[scale]]
    shared: dict[str, Any] = {"model": "mlp", "data": "digits", "eval_steps": 0, "batch": BATCH}
    count = _EXAMPLES[scale] // BATCH
    return [
        PlainCell(method=method, workers=workers, steps=count // workers, lr=LR_OF_ONE * factor, seed=seed, **shared)
        for seed in range(_SEEDS[scale])
        for method in METHODS
        for workers, factor in [*rates, (1, max(WORKERS[scale]))]
    ]


def steps_to(losses: Sequence[float], target: float, window: int) -> int | None:
    """Returns the steps until the mean of the last `window` losses is at most `target`; None if it never is.

    >>> steps_to([4.0, 2.0, 1.0, 1.0], target=1.5, window=2), steps_to([4.0], target=1.0, window=1)
    (3, None)
    """
    window = max(1, window)
    if len(losses) < window:
        return None
    reached = np.flatnonzero(np.convolve(losses, np.ones(window), "valid") <= target * window)
    return int(reached[0]) + window if reached.size else None


def show(found: Found) -> Shown:
    numbers = sorted(found.each("workers"))
    most = max(numbers)
    lines, series = [], [Series(label="linear, as proved", x=numbers, y=numbers, role="paper")]
    for method in METHODS:
        one = _steps(found, method, 1, 1)
        steps = {workers: _steps(found, method, workers, workers) for workers in numbers}
        speedups = {n: one / each for n, each in steps.items() if one is not None and each is not None}
        for workers, each in steps.items():
            speedup = f"{speedups[workers]:.2f}×" if workers in speedups else "–"
            lines.append([method, str(workers), f"{LR_OF_ONE * workers:g}", _text(each), f"{workers}×", speedup])
        alone = _steps(found, method, 1, most)
        gained = "–" if one is None or alone is None else f"{one / alone:.2f}×"
        lines.append([method, "1", f"{LR_OF_ONE * most:g}", _text(alone), "control", gained])
        series.append(Series(label=method, x=list(speedups), y=list(speedups.values())))
    header = ["", "workers", "rate", f"steps to {TARGET:g}", "theorem", "ours"]
    first, _ = found.first
    return Shown(
        setting=(
            f"{first.model} on {first.data}, 1 to {most} workers of {BATCH} examples, plain SGD at "
            f"{LR_OF_ONE:g} a worker, {found.seeds}, in one process."
        ),
        tables=[Table(header, lines, "Steps to a training loss, by workers", left=2)],
        charts=[
            chart("doublesqueeze-speedup", f"Steps to a loss of {TARGET:g}.", series, "workers", "speed-up in steps")
        ],
        notes=[
            f"The loss is the workers' mean over the last {WINDOW:,} examples. The control shows how much of the "
            "speed-up the rate alone gives: one worker at the rate of eight."
        ],
    )


def _steps(found: Found, method: str, workers: int, factor: int) -> float | None:
    """Returns the mean over seeds; None if a run did not reach the target."""
    window = WINDOW // BATCH // workers
    runs = found.where(method=method, workers=workers, lr=LR_OF_ONE * factor)
    steps = [steps_to(each.history.losses, TARGET, window) for each in runs.values()]
    reached = [each for each in steps if each is not None]
    return fmean(reached) if reached and len(reached) == len(steps) else None


def _text(steps: float | None) -> str:
    return "not reached" if steps is None else f"{steps:,.0f}"


SPEEDUP = scaled(
    *("doublesqueeze", _SCALED),
    ("speedup", "steps to a loss by the number of workers, the theorem's claim", 2, cells, show),
)
