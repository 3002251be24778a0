"""Accuracy against time, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.jobs.outcome import RunOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(runs: Sequence[RunOutcome], title: str) -> Figure:
    """Returns a picture of each run's test accuracy over the seconds of training."""
    from matplotlib.figure import Figure  # half a second that no other command should pay

    figure = Figure(figsize=(8, 4.5), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        seconds = [point.seconds for point in run.curve]
        accuracy = [100 * point.accuracy for point in run.curve]
        label = f"{run.design}: {run.steps:,} steps, {run.test_accuracy:.1%}"
        axes.plot(seconds, accuracy, marker=".", label=label)
    axes.set(xlabel="seconds of training", ylabel="test accuracy (%)", title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure
