"""Charts of what chaos did: how long who was struck was away, and a server's growth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.presentation.charts import Chart, Panel, Series


def trials(seconds: Mapping[int, Sequence[float]], title: str) -> Chart | None:
    """Returns a point for each time that somebody came back, by trial; None without any.

    Args:
        seconds: until then, by the trial's number.
        title: of the chart.
    """
    points = [(number, each) for number, times in seconds.items() for each in times]
    if not points:
        return None
    back = Series(label="back", x=[number for number, _ in points], y=[each for _, each in points])
    panel = Panel(title=title, x_label="trial", y_label="seconds until back", series=[back], kind="points")
    return Chart(name="trials", caption="How long who was struck was away.", panels=[panel])


def soak(minutes: Sequence[float], samples: Mapping[str, Sequence[float]], title: str) -> Chart:
    """Returns one panel for each measure of the server, by minute.

    Args:
        minutes: when samples were taken.
        samples: by what they are of.
        title: of the training.
    """
    panels = [
        Panel(
            title=f"{title}: the server's {name}",
            x_label="minute",
            y_label=name,
            series=[Series(label="the server", x=minutes, y=values)],
        )
        for name, values in samples.items()
    ]
    return Chart(name="soak", caption="What the server takes, by minute.", panels=panels)
