"""Pictures of what chaos did: how long who was struck was away, goodput, and a server's growth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_trials(seconds: Mapping[str, Sequence[float]], title: str) -> Figure | None:
    """Returns a dot for each time that somebody came back, by trial; None without any.

    Args:
        seconds: until then, by trial.
        title: of the picture.
    """
    from matplotlib.figure import Figure  # half a second, and few commands draw

    points = [(number, each) for number, (_, times) in enumerate(seconds.items()) for each in times]
    if not points:
        return None
    figure = Figure(figsize=(7, 3.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), ".")
    axes.set(xlabel="trial", ylabel="seconds until back", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    return figure


def draw_soak(minutes: Sequence[float], growth: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Returns one panel for each measure of the server, by minute.

    Args:
        minutes: when samples were taken.
        growth: samples, by what they are of.
        title: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2 * len(growth)), dpi=120, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(growth), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, values) in zip(panels, growth.items(), strict=True):
        axes.plot(minutes, values)
        axes.set(ylabel=name)
        axes.grid(alpha=0.3)
    panels[-1].set(xlabel="minute")
    return figure
