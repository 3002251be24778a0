"""Measured DDP hooks as pictures: step time by link rate, accuracy against seconds, and loss against seconds and bytes.

Every `thinwire` process imports this and few draw, so matplotlib, half a second, is loaded where a picture begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from thinwire.bench.hook_cells import Cell
from thinwire.jobs.outcome import CurvePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osv^DPX<>*hp"
"""Of the methods of a loss race, in turn: colours alone do not tell them apart for everybody."""

MOST_COLUMNS = 3


def draw_step_times(seconds: Mapping[Cell, float]) -> Figure:
    """Returns one panel for each model: bars of step times, in groups by link.

    Args:
        seconds: per step, by cell.
    """
    models = list(dict.fromkeys(cell.model for cell in seconds))
    links = list(dict.fromkeys(cell.link for cell in seconds))
    hooks = list(dict.fromkeys(cell.hook for cell in seconds))
    figure, panels = _panels(len(models), 5, 4.2)
    width = 0.8 / len(hooks)
    for axes, model in zip(panels, models, strict=True):
        for index, name in enumerate(hooks):
            bars = [
                (links.index(cell.link) + (index - (len(hooks) - 1) / 2) * width, 1e3 * step)
                for cell, step in seconds.items()
                if (cell.model, cell.hook) == (model, name)
            ]
            axes.bar([x for x, _ in bars], [y for _, y in bars], width, label=name)
        axes.set_xticks(range(len(links)), [link or "unlimited" for link in links])
        axes.set(yscale="log", ylabel="median step (ms)", title=f"{model}, {next(iter(seconds)).ranks} ranks")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def draw_race(curves: Mapping[Cell, Sequence[CurvePoint]]) -> Figure:
    """Returns one panel for each model and link: accuracy against seconds of training, a colour for each hook.

    Args:
        curves: by cell; a hook's seeds share its colour.
    """
    courses = list(dict.fromkeys((cell.model, cell.link) for cell in curves))
    hooks = list(dict.fromkeys(cell.hook for cell in curves))
    figure, panels = _panels(len(courses), 6, 4.5)
    for axes, (model, link) in zip(panels, courses, strict=True):
        labelled: set[str | None] = set()
        for cell, curve in curves.items():
            if (cell.model, cell.link) == (model, link):
                axes.plot(
                    [point.seconds for point in curve],
                    [100 * point.accuracy for point in curve],
                    color=f"C{hooks.index(cell.hook) % 10}",
                    marker=".",
                    markersize=4,
                    label=None if cell.hook in labelled else cell.hook,
                )
                labelled.add(cell.hook)
        axes.axhline(100 * (next(iter(curves)).target or 0), color="grey", linestyle=":")
        # Hooks differ by tens of times: on a linear axis the slowest would be all there is to see.
        title = f"{model}, {link or 'unlimited'}"
        axes.set(xscale="log", xlabel="seconds of training", ylabel="test accuracy (%)", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="lower right")
    return figure


def draw_loss_race(curves: Mapping[tuple[str, str], Mapping[str, Sequence[tuple[float, float]]]]) -> Figure:
    """Returns one panel for each model and measure: loss against it, a colour for each method, and their frontier.

    Args:
        curves: by model and what is on the horizontal axis, and by method: points of that and the loss.
    """
    methods = list(dict.fromkeys(method for each in curves.values() for method in each))
    figure, panels = _panels(len(curves), 6, 4.5)
    for axes, ((model, measure), each) in zip(panels, curves.items(), strict=True):
        for method, points in each.items():
            xs, ys = zip(*points, strict=True)
            index = methods.index(method)
            marker = MARKERS[index % len(MARKERS)]
            axes.plot(xs, ys, color=f"C{index % 10}", marker=marker, markersize=4, linewidth=1, label=method)
        best, lowest = float("inf"), []
        for x, y in sorted(point for points in each.values() for point in points):
            if y < best:
                best = y
                lowest.append((x, y))
        xs, ys = zip(*lowest, strict=True)
        axes.step(xs, ys, where="post", color="grey", alpha=0.35, linewidth=5, label="the lowest so far")
        axes.set(xscale="log", xlabel=measure, ylabel="held-out nats a byte", title=model)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    return figure


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = min(count, MOST_COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), dpi=120, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for empty in panels[count:]:
        empty.remove()
    return figure, panels[:count]
