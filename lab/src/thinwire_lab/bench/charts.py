"""Measured hooks as charts: step time by link, and a race's scores over the seconds of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire_lab.bench.cells import HookCell
from thinwire_lab.bench.standings import Standing


def step_times(seconds: Mapping[HookCell, float]) -> Chart:
    """Returns one panel for each model: bars of step times, in groups by link, medians over the seeds."""
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


def race(rows: Sequence[Standing], score: str, target: float | None) -> Chart:
    """Returns one panel for each model and link: scores over seconds of training, and the target."""
    panels = []
    for model, link in dict.fromkeys((row.model, row.link) for row in rows):
        series = [
            Series(label=row.method, x=[x for x, _ in curve], y=[y for _, y in curve])
            for row in rows
            if (row.model, row.link) == (model, link)
            for curve in row.curves
        ]
        times = [x for each in series for x in each.x if isinstance(x, float) and x > 0]
        if target is not None and times:
            ends = [min(times), max(times)]
            series.append(Series(label=f"the target, {target:.1%}", x=ends, y=[target, target], role="reference"))
        panels.append(
            Panel(
                title=f"{model}, {link}",
                x_label="seconds of training",
                y_label=score,
                series=series,
                x_log=True,  # methods differ by tens of times
            )
        )
    return Chart(name="race", caption=f"The {score} over the time of training.", panels=panels)


def _bars(seconds: Mapping[HookCell, float]) -> list[Series]:
    """Returns one series for each hook."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell, step in seconds.items():
        found.setdefault(cell.hook, {}).setdefault(cell.link or "unlimited", []).append(1e3 * step)
    return [Series(label=hook, x=list(links), y=list(map(median, links.values()))) for hook, links in found.items()]
