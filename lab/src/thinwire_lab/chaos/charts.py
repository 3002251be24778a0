"""Charts of what chaos did: how long who was struck was away, and a server's growth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire_lab.chaos.outcome import Sample


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


def soak(samples: Mapping[str, Sequence[Sample]]) -> Chart | None:
    """Returns one panel for each measure of the server, by minute, with a line for each training; None without any.

    Args:
        samples: of the server, by training.
    """
    measures = {"MB": "rss_mb", "descriptors": "descriptors", "threads": "threads"}
    panels = [
        Panel(
            title=f"the server's {title}",
            x_label="minute",
            y_label=title,
            series=[
                Series(label=trial, x=[each.minute for each in taken], y=[getattr(each, name) for each in taken])
                for trial, taken in samples.items()
            ],
        )
        for title, name in measures.items()
    ]
    return Chart(name="soak", caption="What the server takes, by minute.", panels=panels) if samples else None
