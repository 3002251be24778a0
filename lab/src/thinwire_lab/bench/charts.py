"""Measured DDP hooks as charts: step time by link, accuracy against seconds, and loss against seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire_lab.bench.hook_cells import HookCell
from thinwire_lab.jobs.outcome import CurvePoint


def step_times(seconds: Mapping[HookCell, float]) -> Chart:
    """Returns one panel for each model: bars of step times, in groups by link, medians over the seeds.

    Args:
        seconds: per step, by cell.
    """
    ranks = next(iter(seconds)).ranks
    panels = [
        Panel(
            title=f"{model}, {ranks} ranks",
            x_label="link",
            y_label="median step (ms)",
            series=_bars({cell: step for cell, step in seconds.items() if cell.model == model}),
            kind="bars",
            y_log=True,
        )
        for model in dict.fromkeys(cell.model for cell in seconds)
    ]
    return Chart(name="step-times", caption="Time of a step by link.", panels=panels)


def race(curves: Mapping[HookCell, Sequence[CurvePoint]]) -> Chart:
    """Returns one panel for each model and link: accuracy against seconds of training, and the target.

    Args:
        curves: by cell; a hook's seeds look the same.
    """
    panels = []
    for model, link in dict.fromkeys((cell.model, cell.link) for cell in curves):
        mine = {cell: curve for cell, curve in curves.items() if (cell.model, cell.link) == (model, link)}
        series = [
            Series(label=cell.hook, x=[each.seconds for each in curve], y=[100 * each.accuracy for each in curve])
            for cell, curve in mine.items()
        ]
        times = [each.seconds for curve in mine.values() for each in curve if each.seconds > 0]
        target = next(iter(mine)).target
        if target is not None and times:
            ends, reached = [min(times), max(times)], [100 * target] * 2
            series.append(Series(label=f"the target, {target:.1%}", x=ends, y=reached, role="reference"))
        panels.append(
            Panel(
                title=f"{model}, {link or 'unlimited'}",
                x_label="seconds of training",
                y_label="test accuracy (%)",
                series=series,
                x_log=True,  # hooks differ by tens of times: on a linear axis the slowest would be all there is to see
            )
        )
    return Chart(name="race", caption="Test accuracy over the time of training.", panels=panels)


def loss_race(curves: Mapping[tuple[str, str], Mapping[str, Sequence[tuple[float, float]]]]) -> Chart:
    """Returns one panel for each model and measure: loss against it by method, and their frontier.

    Args:
        curves: by model and what is on the horizontal axis, and by method: points of that and the loss.
    """
    panels = []
    for (model, measure), each in curves.items():
        series = [
            Series(label=method, x=[x for x, _ in points], y=[y for _, y in points]) for method, points in each.items()
        ]
        series.append(_lowest([point for points in each.values() for point in points]))
        panels.append(Panel(title=model, x_label=measure, y_label="held-out nats a byte", series=series, x_log=True))
    return Chart(name="loss-race", caption="Held-out loss by what a method has taken.", panels=panels)


def _bars(seconds: Mapping[HookCell, float]) -> list[Series]:
    found: dict[str, dict[str, list[float]]] = {}
    for cell, step in seconds.items():
        found.setdefault(cell.hook, {}).setdefault(cell.link or "unlimited", []).append(1e3 * step)
    return [Series(label=hook, x=list(links), y=list(map(median, links.values()))) for hook, links in found.items()]


def _lowest(points: Sequence[tuple[float, float]]) -> Series:
    """Returns steps downwards: a loss stands until a lower one is reached.

    >>> frontier = _lowest([(1.0, 3.0), (2.0, 3.5), (4.0, 2.0)])
    >>> frontier.x, frontier.y
    ([1.0, 4.0, 4.0], [3.0, 3.0, 2.0])
    """
    xs: list[float] = []
    ys: list[float] = []
    for x, y in sorted(points):
        if not ys:
            xs, ys = [x], [y]
        elif y < ys[-1]:
            xs, ys = [*xs, x, x], [*ys, ys[-1], y]
    return Series(label="the lowest so far", x=xs, y=ys, role="reference")
