"""The hooks of `hooks_bench`, as a picture: step time against link rate, and accuracy against time where it was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw_hooks(cells: list[dict[str, Any]], path: Path) -> None:
    """Draws one panel for each model, and one for each model and link with a target accuracy, into a PNG.

    Args:
        cells: outcomes of `hooks_bench.run_cell`.
        path: of the PNG; its folder is made.
    """
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    races = list(dict.fromkeys((cell["model"], cell["link"]) for cell in cells if cell["target"] is not None))
    columns = max(len(models), len(races))
    figure = Figure(figsize=(5 * columns, 4.2 * (1 + bool(races))), dpi=120, layout="constrained")
    for index, model in enumerate(models):
        axes = figure.add_subplot(1 + bool(races), columns, index + 1)
        _step_times(axes, [cell for cell in cells if cell["model"] == model], model)
    for index, (model, link) in enumerate(races):
        axes = figure.add_subplot(2, columns, columns + index + 1)
        chosen = [c for c in cells if (c["model"], c["link"]) == (model, link) and c["target"] is not None]
        _race(axes, chosen, f"{model}, {link or 'unlimited'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _step_times(axes: Axes, cells: list[dict[str, Any]], model: str) -> None:
    links = list(dict.fromkeys(cell["link"] for cell in cells))
    names = list(dict.fromkeys(cell["hook"] for cell in cells))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        points = [
            (links.index(cell["link"]) + (index - (len(names) - 1) / 2) * width, 1e3 * cell["seconds_per_step"])
            for cell in cells
            if cell["hook"] == name
        ]
        axes.bar([x for x, _ in points], [y for _, y in points], width, label=name)
    axes.set_xticks(range(len(links)), [link or "unlimited" for link in links])
    axes.set(yscale="log", ylabel="median step (ms)", title=f"{model}, {cells[0]['ranks']} ranks")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")


def _race(axes: Axes, cells: list[dict[str, Any]], title: str) -> None:
    for cell in cells:
        seconds = [point["seconds"] for point in cell["curve"]]
        axes.plot(seconds, [100 * point["accuracy"] for point in cell["curve"]], marker=".", label=cell["hook"])
    axes.axhline(100 * cells[0]["target"], color="grey", linestyle=":")
    axes.set(xlabel="seconds of training", ylabel="test accuracy (%)", title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
