"""The hooks of `bench.hooks`, as pictures: step time by link rate, and accuracy against seconds.

Every `thinwire` process imports this and few draw, so matplotlib, half a second, is loaded where a picture begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_hooks(cells: list[dict[str, Any]], path: Path) -> None:
    """Draws one panel for each model, step times by link, into a PNG.

    Args:
        cells: outcomes of `hooks.run_cell`.
        path: of the PNG; its folder is made.
    """
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(cell["model"] for cell in cells))
    figure = Figure(figsize=(5 * len(models), 4.2), dpi=120, layout="constrained")
    for index, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), index + 1)
        _step_times(axes, [cell for cell in cells if cell["model"] == model], model)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_race(outcomes: list[dict[str, Any]], path: Path) -> None:
    """Draws accuracy against seconds of training, one panel for each model and link, into a PNG.

    Args:
        outcomes: of `race.race`; a hook's seeds share a colour.
        path: of the PNG; its folder is made.
    """
    from matplotlib.figure import Figure

    courses = list(dict.fromkeys((outcome["model"], outcome["link"]) for outcome in outcomes))
    figure = Figure(figsize=(6 * len(courses), 4.5), dpi=120, layout="constrained")
    for index, (model, link) in enumerate(courses):
        axes = figure.add_subplot(1, len(courses), index + 1)
        chosen = [outcome for outcome in outcomes if (outcome["model"], outcome["link"]) == (model, link)]
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


def _race(axes: Axes, outcomes: list[dict[str, Any]], title: str) -> None:
    names = list(dict.fromkeys(outcome["hook"] for outcome in outcomes))
    labelled = set()
    for outcome in outcomes:
        name = outcome["hook"]
        axes.plot(
            [point["seconds"] for point in outcome["curve"]],
            [100 * point["accuracy"] for point in outcome["curve"]],
            color=f"C{names.index(name) % 10}",
            marker=".",
            markersize=4,
            label=None if name in labelled else name,
        )
        labelled.add(name)
    axes.axhline(100 * outcomes[0]["target"], color="grey", linestyle=":")
    # Hooks differ by tens of times: on a linear axis the slowest would be all there is to see.
    axes.set(xscale="log", xlabel="seconds of training", ylabel="test accuracy (%)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
