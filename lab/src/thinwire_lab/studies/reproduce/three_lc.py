"""3LC (Lim, Andersen, Kaminsky 2019): its tables and figures, which share their runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from thinwire.presentation.charts import Chart, Panel, Series, smooth
from thinwire.presentation.tables import Table
from thinwire_lab.studies.reproduce.entry import Found, Shown, scaled
from thinwire_lab.studies.reproduce.three_lc_riddles import RIDDLES
from thinwire_lab.studies.reproduce.three_lc_runs import (
    FIGURE_3,
    FIGURE_5,
    MULTIPLIERS,
    SCALED,
    TABLE_1,
    by_multiplier,
    setting,
    trainings,
)

NO_ZRE = "3lc[zero_run=false]"

# Ratio and bits of table 2, by multiplier.
_TABLE_2 = {NO_ZRE: (20.0, 1.60), "1.0": (39.4, 0.812), "1.5": (70.9, 0.451), "1.75": (107.0, 0.298)}
_TABLE_2 |= {"1.9": (160.0, 0.200)}
_CROSSOVER = 0.7


def _show_table_2(found: Found) -> Shown:
    lines = []
    for label, (ratio, bits) in _TABLE_2.items():
        runs = found.where(design=label if label == NO_ZRE else by_multiplier(label))
        up = runs.mean(lambda each: fmean(each.history.bits_push))
        down = runs.mean(lambda each: fmean(each.history.bits_pull[1:]))
        lines.append(
            [
                "No ZRE" if label == NO_ZRE else f"s = {label}",
                *(f"{ratio:g}×", f"{64 / (up + down):.1f}×", f"{bits:.3f}", f"{(up + down) / 2:.3f}"),
                *(f"{up:.3f}", f"{down:.3f}", f"{runs.mean(lambda each: each.compression_ratio):.1f}×"),
            ]
        )
    header = ["", "ratio, paper", "ratio, ours", "bits, paper", "bits, ours", "push", "pull", "ratio, all tensors"]
    return Shown(
        setting=setting(found),
        tables=[Table(header, lines, "Average traffic compression")],
        notes=["Bits and ratio are of compressed tensors, as in the paper; the last column counts all tensors."],
    )


def _show_figure_6(found: Found) -> Shown:
    panels, lines = [], []
    for multiplier in ("1.0", "1.75"):
        histories = [each.history for each in found.where(design=by_multiplier(multiplier)).values()]
        steps = len(histories[0].losses)
        push = [fmean([each.bits_push[step] for each in histories]) for step in range(steps)]
        pull = [fmean([each.bits_pull[step] for each in histories]) for step in range(steps)]
        series = []
        for label, values in (("push", push), ("pull", pull)):
            x, y = smooth(values[1:], most=100)
            series.append(Series(label=label, x=[(1 + each) / steps for each in x], y=y))
        panels.append(
            Panel(title=f"s = {multiplier}", x_label="share of the steps", y_label="bits a value", series=series)
        )
        crossing = crossover(push[1:], pull[1:])
        ours = "pushes stay smaller" if crossing is None else f"{crossing:.0%} of the steps"
        lines.append([f"s = {multiplier}", f"about {_CROSSOVER:.0%} of the steps", ours])
    return Shown(
        setting=setting(found),
        tables=[Table(["pushes become larger than pulls after", "paper", "ours"], lines)],
        charts=[Chart(name="3lc-figure-6", caption="Compressed size per value by step.", panels=panels)],
        notes=["The first step, whose pull is no average yet, is left out."],
    )


def _show_figure_4(found: Found) -> Shown:
    losses, accuracies, lines = [], [], []
    for design in found.each("design"):
        mine = list(found.where(design=design).values())
        curves = [each.history.losses for each in mine]
        x, y = smooth([fmean(step) for step in zip(*curves, strict=True)], most=60)
        losses.append(Series(label=design, x=x, y=y))
        steps = [step for step, _ in mine[0].evaluations]
        points = [100 * fmean([each.evaluations[i][1] for each in mine]) for i in range(len(steps))]
        accuracies.append(Series(label=design, x=steps, y=points))
        half = next(i for i, step in enumerate(steps) if 2 * step >= steps[-1])
        lines.append([design, f"{y[-1]:.3f}", f"{points[half]:.2f}", f"{points[-1]:.2f}"])
    panels = [
        Panel(title="training loss", x_label="step", y_label="loss (nats)", series=losses),
        Panel(title="test accuracy", x_label="step", y_label="accuracy (%)", series=accuracies),
    ]
    return Shown(
        setting=setting(found),
        tables=[Table(["design", "last loss", "accuracy % half-way", "at the end"], lines)],
        charts=[Chart(name="3lc-figure-4", caption="Loss, smoothed, and accuracy by step.", panels=panels)],
        notes=["The paper: designs with less traffic learn more slowly, except 3LC, which stays close to float."],
    )


def crossover(push: Sequence[float], pull: Sequence[float], windows: int = 50) -> float | None:
    """Returns the share of the run from which on pushes are larger than pulls to its end; None if they never are.

    >>> crossover([1, 1, 3, 3], [2, 2, 2, 2], windows=4), crossover([1, 1], [2, 2])
    (0.5, None)
    """
    ups, downs = (smooth(values, most=windows)[1] for values in (push, pull))
    last = max((index for index, (up, down) in enumerate(zip(ups, downs, strict=True)) if up <= down), default=-1)
    return None if last == len(ups) - 1 else (last + 1) / len(ups)


_SWEEP = [NO_ZRE, *map(by_multiplier, MULTIPLIERS)]
_DRAWN = ["fp32", "stoch3", "sparse5", "local2", by_multiplier("1.0")]
_TWO = [by_multiplier("1.0"), by_multiplier("1.75")]

ENTRIES = (
    *scaled(
        *("3lc", SCALED),
        ("table-1", "speed-up on three links, and accuracy, of ten designs", 3, *TABLE_1),
        ("figure-3", "training time and accuracy at 25 to 100 % of the steps, three links", 4, *FIGURE_3),
        ("figure-4", "training loss and test accuracy by step", 2, partial(trainings, _DRAWN), _show_figure_4),
        ("figure-5", "training time and accuracy by sparsity multiplier", 3, *FIGURE_5),
        ("table-2", "compression ratio and bits by multiplier", 2, partial(trainings, _SWEEP), _show_table_2),
        ("figure-6", "compressed size per value by step, push and pull", 1, partial(trainings, _TWO), _show_figure_6),
    ),
    *RIDDLES,
)
