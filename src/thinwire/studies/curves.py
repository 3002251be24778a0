"""Accuracy against time, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_curves(runs: list[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draws each run's test accuracy over the seconds of training into a PNG.

    Args:
        runs: outcomes of `jobs.run`, each with its `curve`.
        path: of the PNG; its folder is made.
        title: above the picture.
    """
    from matplotlib.figure import Figure  # half a second that no other command should pay

    figure = Figure(figsize=(8, 4.5), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        seconds = [point["seconds"] for point in run["curve"]]
        accuracy = [100 * point["accuracy"] for point in run["curve"]]
        label = f"{run['design']}: {run['steps']:,} steps, {run['test_accuracy']:.1%}"
        axes.plot(seconds, accuracy, marker=".", label=label)
    axes.set(xlabel="seconds of training", ylabel="test accuracy (%)", title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
