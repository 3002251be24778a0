"""Charts as data, drawn twice: by plotly for the page, by matplotlib for pictures.

Series differ in colour, marker and dash, so that a chart can be read in grey. What a paper printed is black, with
crosses. Both libraries are loaded where something is drawn: every `thinwire` process imports this and few draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["lines", "points", "bars"]
Picture = Literal["png", "svg"]
PICTURES: Sequence[Picture] = ("png", "svg")

# Okabe & Ito's colours, which the colour-blind tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
_MARKERS = (
    *(("circle", "o"), ("square", "s"), ("triangle-up", "^"), ("diamond", "D")),
    *(("triangle-down", "v"), ("pentagon", "p"), ("star", "*"), ("hexagon", "h")),
)
_DASHES = (("solid", "-"), ("dash", "--"), ("dot", ":"), ("dashdot", "-."))
_HATCHES = (("", ""), ("/", "//"), ("x", "xx"), (".", ".."), ("\\", "\\\\"), ("-", "--"), ("|", "||"), ("+", "++"))
_PAPER = "#000000"
_MARKS = 12
"""So many markers on a line, however many points it has."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve, set of points, or group of bars.

    Args:
        label: in the legend.
        x, y: as many of each; the x of bars are names.
        error: half the height of each error bar.
        text: beside each point.
        paper: these are the paper's own numbers.
    """

    label: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    error: Sequence[float] | None = None
    text: Sequence[str] | None = None
    paper: bool = False

    def __post_init__(self) -> None:
        for name, values in (("x", self.x), ("error", self.error), ("text", self.text)):
            assert values is None or len(values) == len(self.y), f"{self.label}: {len(self.y)} y, {len(values)} {name}"


FEW_TICKS = 10
"""Labels that fit beside each other below a panel."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes, with units in its labels."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: Kind = "lines"
    x_log: bool = False
    y_log: bool = False

    def ticks(self) -> list[float]:
        """Returns where a logarithmic x axis is labelled: at its own values, where they are few; else libraries choose.

        >>> halves = Series(label="s", x=[125, 250, 500], y=[1, 2, 3])
        >>> Panel(title="", x_label="steps", y_label="points", series=[halves], x_log=True).ticks()
        [125.0, 250.0, 500.0]
        """
        found = sorted({float(x) for series in self.series for x in series.x}) if self.x_log else []
        return found if len(found) <= FEW_TICKS else []


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels side by side.

    Args:
        name: of the picture's file, without its ending.
        caption: what is to be seen.
        panels: from left to right. Series with the same label look the same in all.
    """

    name: str
    caption: str
    panels: Sequence[Panel]

    def labels(self) -> list[str]:
        """Returns the series' labels, each once; a series' place among them is how it looks."""
        return list(dict.fromkeys(series.label for panel in self.panels for series in panel.series))


def smooth(values: Sequence[float], most: int = 400) -> tuple[list[float], list[float]]:
    """Returns centres and means of at most so many equal windows of a long series.

    >>> smooth([1.0, 3.0, 5.0, 7.0], most=2)
    ([0.5, 2.5], [2.0, 6.0])
    """
    width = max(1, -(-len(values) // most))
    windows = [(start, values[start : start + width]) for start in range(0, len(values), width)]
    return [start + (len(w) - 1) / 2 for start, w in windows], [sum(w) / len(w) for _, w in windows]


def to_plotly(chart: Chart) -> str:
    """Returns the chart as the JSON of a plotly figure."""
    from plotly.graph_objects import Bar, Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(chart.panels), subplot_titles=[panel.title for panel in chart.panels])
    labels = chart.labels()
    told: set[str] = set()
    for column, panel in enumerate(chart.panels, 1):
        for series in panel.series:
            index = labels.index(series.label)
            colour = _PAPER if series.paper else _COLOURS[index % len(_COLOURS)]
            shared: dict[str, Any] = {"name": series.label, "legendgroup": series.label}
            shared |= {"x": list(series.x), "y": list(series.y), "showlegend": series.label not in told}
            if series.error is not None:
                shared["error_y"] = {"type": "data", "array": list(series.error)}
            if panel.kind == "bars":
                pattern = {"shape": _HATCHES[index % len(_HATCHES)][0]}
                trace: Any = Bar(**shared, marker={"color": colour, "pattern": pattern}, text=series.text)
            else:
                marker = {
                    "color": colour,
                    "size": 8,
                    "symbol": "x" if series.paper else _MARKERS[index % len(_MARKERS)][0],
                    "maxdisplayed": 0 if panel.kind == "points" else _MARKS,
                }
                mode = "markers" if panel.kind == "points" else "lines+markers"
                line = {"color": colour, "dash": _DASHES[index % len(_DASHES)][0]}
                trace = Scatter(**shared, mode=mode, marker=marker, line=line, text=series.text)
            figure.add_trace(trace, row=1, col=column)
            told.add(series.label)
        kind = "log" if panel.x_log else "category" if panel.kind == "bars" else "linear"
        figure.update_xaxes(title_text=panel.x_label, type=kind, row=1, col=column)
        if ticks := panel.ticks():
            figure.update_xaxes(tickvals=ticks, ticktext=[f"{x:g}" for x in ticks], row=1, col=column)
        figure.update_yaxes(title_text=panel.y_label, type="log" if panel.y_log else "linear", row=1, col=column)
    legend = {"orientation": "h", "y": -0.25}
    figure.update_layout(template="plotly_white", height=440, legend=legend, margin={"t": 40, "r": 20})
    text: str = figure.to_json()
    return text


def to_matplotlib(chart: Chart) -> Figure:
    """Returns the chart as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 5.0 * len(chart.panels)), 4.2), dpi=110, layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(chart.panels), squeeze=False)[0])
    labels = chart.labels()
    handles: dict[str, Any] = {}
    for axes, panel in zip(panels, chart.panels, strict=True):
        names = list(dict.fromkeys(str(x) for series in panel.series for x in series.x))
        for place, series in enumerate(panel.series):
            index = labels.index(series.label)
            colour = _PAPER if series.paper else _COLOURS[index % len(_COLOURS)]
            if panel.kind == "bars":
                width = 0.8 / len(panel.series)
                offset = (place - (len(panel.series) - 1) / 2) * width
                at = [names.index(str(x)) + offset for x in series.x]
                hatch = _HATCHES[index % len(_HATCHES)][1]
                drawn: Any = axes.bar(at, series.y, width, yerr=series.error, color=colour, hatch=hatch, ec="white")
            else:
                drawn = axes.errorbar(
                    [float(x) for x in series.x],
                    series.y,
                    yerr=series.error,
                    color=colour,
                    marker="x" if series.paper else _MARKERS[index % len(_MARKERS)][1],
                    linestyle="none" if panel.kind == "points" else _DASHES[index % len(_DASHES)][1],
                    markevery=1 if panel.kind == "points" else max(1, len(series.y) // _MARKS),
                    markersize=5,
                    capsize=2,
                )
            handles.setdefault(series.label, drawn)
        if panel.kind == "bars":
            turned = sum(map(len, names)) > 40
            axes.set_xticks(range(len(names)), names, rotation=30 if turned else 0, ha="right" if turned else "center")
        elif panel.x_log:
            axes.set_xscale("log")
            if ticks := panel.ticks():
                axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
                axes.set_xticks([], minor=True)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
        if panel.y_log:
            axes.set_yscale("log")
        axes.grid(alpha=0.3, axis="y" if panel.kind == "bars" else "both")
    if len(handles) > 1:
        where: Any = "outside lower center"  # matplotlib's stubs list its strings only beside other types
        # A letter is some 0.075 inches wide; a line and the space around it half an inch.
        columns = int(figure.get_figwidth() / (0.075 * max(map(len, handles)) + 0.6))
        figure.legend(list(handles.values()), list(handles), loc=where, ncols=max(1, min(4, columns)), fontsize="small")
    return figure


def draw(chart: Chart, folder: Path, pictures: Sequence[Picture] = PICTURES) -> list[Path]:
    """Writes the chart in some formats, and returns where."""
    picture = to_matplotlib(chart)
    paths = [folder / f"{chart.name}.{ending}" for ending in pictures]
    for path in paths:
        picture.savefig(path)
        picture.set_layout_engine(None)  # what the first has laid out stays: that takes as long as drawing does
    return paths
