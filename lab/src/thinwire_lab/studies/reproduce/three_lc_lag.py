"""The accuracy that s = 1.75 loses to s = 1.0, and the lag of its residuals; not in 3LC's paper."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from thinwire.presentation.charts import Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.reproduce.entry import Found, Scale, Shown, chart, scaled
from thinwire_lab.studies.reproduce.job_cells import TrainingCell
from thinwire_lab.studies.reproduce.three_lc import PRINTED, SCALED, by_multiplier, setting, trainings

SHARES = (0.25, 0.5, 1.0, 2.0)  # of the standard number of steps; those up to 1 are figure 3's runs
MANY: dict[Scale, tuple[int, int]] = {"tiny": (3, 8), "quick": (10, 32), "full": (10, 32)}
"""Workers and batch of the paper."""
_CALM, _SPARSE = by_multiplier("1.0"), by_multiplier("1.75")


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


LAG = scaled(
    *("3lc", SCALED),
    ("lag", "what s = 1.75 loses to s = 1.0 by steps, workers and batch", 3, _lag_cells, _show_lag),
)
