"""Two measurements that 3LC's paper does not have, of the cost of a large sparsity multiplier.

*Lag*: the accuracy that s = 1.75 loses to s = 1.0, beside the steps by which its residuals are late. *Reversals*: how
many of a pull's values have the other sign than the value before at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from thinwire.presentation.charts import Chart, Panel, Series, smooth
from thinwire.presentation.tables import Table
from thinwire_lab.studies.reproduce.entry import Found, OnProgress, Scale, Shown, chart, scaled
from thinwire_lab.studies.reproduce.job_cells import TrainingCell, TrainingFinding, train
from thinwire_lab.studies.reproduce.three_lc import MULTIPLIERS, PRINTED, SCALED, by_multiplier, setting, trainings

SHARES = (0.25, 0.5, 1.0, 2.0)  # of the standard number of steps; those up to 1 are figure 3's runs
MANY: dict[Scale, tuple[int, int]] = {"tiny": (3, 8), "quick": (10, 32), "full": (10, 32)}
"""Workers and batch of the paper."""
RATES = (0.02, 0.005)  # the digits' recipe, and a quarter of it
_CALM, _SPARSE = by_multiplier("1.0"), by_multiplier("1.75")
_REVERSAL_STEPS: dict[Scale, int] = {"tiny": 6, "quick": 1500, "full": 3000}
_REVERSAL_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 1, "full": 3}


class ReversalsFinding(TrainingFinding, frozen=True, kw_only=True):
    """The results of a training, and its pulls step by step."""

    sent: list[float]  # share of the compressed values that a pull changes
    reversed: list[float]  # share of these whose last change had the other sign


class Pulls:
    """Compares one worker's weights from step to step.

    >>> pulls, layer = Pulls(), nn.Linear(2, 1, bias=False)
    >>> for weights in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0]):
    ...     layer.weight.data[:] = torch.tensor(weights)
    ...     pulls.look(layer)
    >>> pulls.sent, pulls.reversed
    ([0.5, 1.0], [0.0, 0.5])
    """

    def __init__(self) -> None:
        self._before: np.ndarray[Any, np.dtype[np.float32]] | None = None
        self._last: Any = 0.0
        self.sent: list[float] = []
        self.reversed: list[float] = []

    def look(self, model: nn.Module) -> None:
        """Takes the weights after a step; biases and norms, which travel uncompressed, are left out."""
        now = torch.cat([each.detach().reshape(-1) for each in model.parameters() if each.ndim > 1]).numpy()
        if self._before is not None:
            signs = np.sign(now - self._before)
            sent = signs != 0
            self.sent.append(float(sent.mean()))
            self.reversed.append(float((signs * self._last < 0).sum() / max(1, sent.sum())))
            self._last = np.where(sent, signs, self._last)
        self._before = now


class ReversalsCell(TrainingCell, frozen=True, kw_only=True):
    """A training whose pulls are looked at."""

    finding = ReversalsFinding

    def run(self, on_progress: OnProgress) -> ReversalsFinding:
        pulls = Pulls()

        def on_step(rank: int, step: int, loss: float, model: nn.Module) -> None:
            if rank == 0:
                pulls.look(model)

        trained = train(self, on_progress, on_step=on_step)
        return trained.grown(ReversalsFinding, sent=pulls.sent, reversed=pulls.reversed)


def _reversal_cells(scale: Scale) -> Sequence[ReversalsCell]:
    shared: dict[str, Any] = {"model": "mlp", "data": "digits", "workers": 4, "eval_steps": 0}
    return [
        ReversalsCell(design=by_multiplier(multiplier), steps=_REVERSAL_STEPS[scale], lr=rate, seed=seed, **shared)
        for seed in range(_REVERSAL_SEEDS[scale])
        for rate in RATES
        for multiplier in MULTIPLIERS
    ]


def _show_reversals(found: Found) -> Shown:
    lines, panels = [], []
    for rate in RATES:
        series = []
        for multiplier in MULTIPLIERS:
            runs = found.where(design=by_multiplier(multiplier), lr=rate)
            curve = [fmean(step) for step in zip(*(each.reversed for each in runs.values()), strict=True)]
            x, y = smooth(curve, most=60)
            series.append(Series(label=f"s = {multiplier}", x=x, y=[100 * each for each in y]))
            turned = runs.mean(lambda f: sum(map(mul, f.sent, f.reversed)) / max(1e-12, sum(f.sent)))
            push = runs.mean(lambda f: fmean(f.history.bits_push))
            pull = runs.mean(lambda f: fmean(f.history.bits_pull[1:]))
            lag, accuracy = runs.mean(lambda f: f.lag), runs.mean(lambda f: f.accuracy)
            texts = f"{push:.3f}", f"{pull:.3f}", f"{turned:.1%}", f"{lag:.0f}", f"{accuracy:.2%}"
            lines.append([f"{rate:g}", f"s = {multiplier}", *texts])
        title = f"rate {rate:g}"
        panels.append(Panel(title=title, x_label="step", y_label="reversed of what is sent, %", series=series))
    first, finding = found.first
    header = ["rate", "", "bits, push", "bits, pull", "reversed of the values pulled", "lag, steps", "accuracy"]
    return Shown(
        setting=(
            f"{first.model} on {first.data}, {first.workers} workers of {finding.batch} examples, {first.steps:,} "
            f"steps, cosine decay, {found.seeds}, in one process."
        ),
        tables=[Table(header, lines, "Reversals", left=2)],
        charts=[Chart(name="3lc-reversals", caption="Values that take back the one before.", panels=panels)],
        notes=[
            "A value is reversed where a pull changes a weight against the direction of the last change. Bits are of "
            "compressed tensors, as in table 2."
        ],
    )


def _lag_cells(scale: Scale) -> Sequence[TrainingCell]:
    workers, batch = MANY[scale]
    designs = (_CALM, _SPARSE)
    by_steps = [cell for share in SHARES for cell in trainings(designs, scale, share=share)]
    many = [msgspec.structs.replace(each, workers=workers, batch=batch) for each in trainings(designs, scale)]
    return [*by_steps, *many]


def _show_lag(found: Found) -> Shown:
    lines, lost, budgets = [], [], []
    first, finding = found.first
    usual = first.workers, finding.batch
    for workers, batch, steps in dict.fromkeys((c.workers, f.batch, c.steps) for c, f in found.items()):
        group = Found({c: f for c, f in found.items() if (c.workers, f.batch, c.steps) == (workers, batch, steps)})
        calm, sparse = group.where(design=_CALM), group.where(design=_SPARSE)
        pairs = zip(*(each.figures(lambda f: 100 * f.accuracy) for each in (calm, sparse)), strict=True)
        points = [late - soon for soon, late in pairs]
        lags = [each.mean(lambda f: f.lag) for each in (calm, sparse)]
        if (workers, batch) == usual:
            budgets.append(steps)
            lost.append(fmean(points))
        lines.append(
            [
                *(f"{workers} × {batch}", f"{steps:,}"),
                *(f"{each.mean(lambda f: f.accuracy):.2%}" for each in (calm, sparse)),
                *(f"{fmean(points):+.2f}", f"{min(points):+.2f} … {max(points):+.2f}"),
                *(f"{lags[0]:.0f}", f"{lags[1]:.0f}", f"{lags[1] / steps:.2%}"),
            ]
        )
    header = ["workers × batch", "steps", "s = 1.0", "s = 1.75", "difference, points", "by seed"]
    header += ["lag at 1.0, steps", "at 1.75", "of the training"]
    printed = round(PRINTED[_SPARSE][-1] - PRINTED[_CALM][-1], 2)
    paper = Series(label="paper, 25,600 steps", x=[budgets[0], budgets[-1]], y=[printed, printed], role="paper")
    series = [paper, Series(label=f"{usual[0]} workers of {usual[1]}", x=budgets, y=lost)]
    axes = "steps", "s = 1.75 minus s = 1.0, points"
    return Shown(
        setting=setting(found),
        tables=[Table(header, lines, "What s = 1.75 loses", left=1)],
        charts=[chart("3lc-lag", "Accuracy of s = 1.75 beside s = 1.0, by steps.", series, *axes, x_log=True)],
        notes=[
            f"The paper's table 1 has {printed:+.2f} points with 10 workers of 32 examples and 25,600 steps. The lag "
            "is the largest residual at the end in units of a step's update: how late a change arrives."
        ],
    )


RIDDLES = scaled(
    *("3lc", SCALED),
    ("lag", "what s = 1.75 loses to s = 1.0 by steps, workers and batch", 3, _lag_cells, _show_lag),
    (
        "reversals",
        "values that a pull takes back, by sparsity multiplier and rate",
        2,
        _reversal_cells,
        _show_reversals,
    ),
)
