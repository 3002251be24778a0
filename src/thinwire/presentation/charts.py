"""Charts as data, drawn twice: by plotly for the page, by matplotlib for pictures.

Series differ in colour, marker and dash, so that a chart can be read in grey. What a paper printed is black, with
crosses; what helps to read the others, as a target does, is a pale band below them. Both libraries are loaded where
something is drawn: every `thinwire` process imports this and few draw.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from thinwire.errors import ConfigError
from thinwire.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["lines", "points", "bars"]
Role = Literal["ours", "paper", "reference"]
Picture = Literal["png", "svg"]
PICTURES: Sequence[Picture] = ("png", "svg")

# Okabe & Ito's colours, which the colour-blind tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
# Eleven, so that the ninth series, whose colour and dash are the first's, has a marker or a hatch of its own. Plotly
# has eight hatches: there the ninth's is another colour's.
_MARKERS = (
    *(("circle", "o"), ("square", "s"), ("triangle-up", "^"), ("diamond", "D")),
    *(("triangle-down", "v"), ("pentagon", "p"), ("star", "*"), ("hexagon", "h")),
    *(("triangle-left", "<"), ("triangle-right", ">"), ("cross", "P")),
)
_DASHES = (("solid", "-"), ("dash", "--"), ("dot", ":"), ("dashdot", "-."))
_HATCHES = (
    *(("", ""), ("/", "//"), ("x", "xx"), (".", ".."), ("\\", "\\\\"), ("-", "--"), ("|", "||"), ("+", "++")),
    *(("/", "oo"), ("x", "O"), (".", "**")),
)
_PAPER = "#000000"
_REFERENCE = "#C8C8C8"
_BAND = 5
"""How many points wide a reference is."""
_MARKS = 12
"""So many markers on a line, however many points it has."""

MOST_COLUMNS = 3
"""Panels beside each other in a picture, which is then as wide as a screen."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve, set of points, or group of bars.

    Args:
        label: in the legend.
        x, y: as many of each; the x of bars are names.
        error: half the height of each error bar.
        text: beside each point.
        role: whose numbers these are; a reference only helps to read the others, and is a line among points too.
    """

    label: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    error: Sequence[float] | None = None
    text: Sequence[str] | None = None
    role: Role = "ours"

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
        """Returns where a logarithmic x axis is labelled: at its own values where they are few and whole, as what was
        chosen is and what was measured is not; else libraries choose.

        >>> halves = Series(label="s", x=[125, 250, 500], y=[1, 2, 3])
        >>> Panel(title="", x_label="steps", y_label="points", series=[halves], x_log=True).ticks()
        [125.0, 250.0, 500.0]
        """
        found = sorted({float(x) for series in self.series for x in series.x}) if self.x_log else []
        return found if len(found) <= FEW_TICKS and all(x > 0 and x.is_integer() for x in found) else []


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels side by side.

    Args:
        name: of the picture's file, without its ending.
        caption: what is to be seen.
        panels: from left to right, in a picture in rows. Series with the same label look the same in all.
    """

    name: str
    caption: str
    panels: Sequence[Panel]

    def labels(self) -> list[str]:
        """Returns the series' labels in the order of the legend, each once, references last."""
        every = [series for panel in self.panels for series in panel.series]
        return list(dict.fromkeys(each.label for each in sorted(every, key=lambda each: each.role == "reference")))


def smooth(values: Sequence[float], most: int = 400) -> tuple[list[float], list[float]]:
    """Returns centres and means of at most so many equal windows of a long series.

    >>> smooth([1.0, 3.0, 5.0, 7.0], most=2)
    ([0.5, 2.5], [2.0, 6.0])
    """
    width = max(1, -(-len(values) // most))
    windows = [(start, values[start : start + width]) for start in range(0, len(values), width)]
    return [start + (len(w) - 1) / 2 for start, w in windows], [sum(w) / len(w) for _, w in windows]


class _Look(NamedTuple):
    """What a series is told by. Of a pair, plotly takes the first and matplotlib the second."""

    colour: str
    marker: tuple[str, str]
    dash: tuple[str, str]
    hatch: tuple[str, str]


def _looks(chart: Chart) -> dict[str, _Look]:
    """Returns how each series looks, by label: what its place in the legend and its role make of it."""
    roles = {series.label: series.role for panel in chart.panels for series in panel.series}
    looks = {}
    for index, label in enumerate(chart.labels()):
        marker, dash, hatch = (pairs[index % len(pairs)] for pairs in (_MARKERS, _DASHES, _HATCHES))
        look = _Look(_COLOURS[index % len(_COLOURS)], marker, dash, hatch)
        if roles[label] == "paper":
            look = look._replace(colour=_PAPER, marker=("x", "x"))
        elif roles[label] == "reference":
            look = look._replace(colour=_REFERENCE, dash=_DASHES[0])
        looks[label] = look
    return looks


def to_plotly(chart: Chart) -> str:
    """Returns the chart as the JSON of a plotly figure.

    Raises:
        ConfigError: plotly is not installed.
    """
    require("an interactive chart", "plotly")
    from plotly.graph_objects import Bar, Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(chart.panels), subplot_titles=[panel.title for panel in chart.panels])
    looks = _looks(chart)
    told: set[str] = set()
    for column, panel in enumerate(chart.panels, 1):
        for series in panel.series:
            look = looks[series.label]
            shared: dict[str, Any] = {"name": series.label, "legendgroup": series.label}
            shared |= {"x": list(series.x), "y": list(series.y), "showlegend": series.label not in told}
            if series.error is not None:
                shared["error_y"] = {"type": "data", "array": list(series.error)}
            if panel.kind == "bars":
                marker: dict[str, Any] = {"color": look.colour, "pattern": {"shape": look.hatch[0]}}
                trace: Any = Bar(**shared, marker=marker, text=series.text)
            elif series.role == "reference":
                line = {"color": look.colour, "width": _BAND}
                shared |= {"zorder": -1, "legendrank": 1001}  # below all; behind all, whose rank is 1000 by default
                trace = Scatter(**shared, mode="lines", line=line, text=series.text)
            else:
                marker = {
                    "color": look.colour,
                    "size": 8,
                    "symbol": look.marker[0],
                    "maxdisplayed": 0 if panel.kind == "points" else _MARKS,
                }
                mode = "markers" if panel.kind == "points" else "lines+markers"
                line = {"color": look.colour, "dash": look.dash[0]}
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
    """Returns the chart as a picture: panels in rows, and one legend below all.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require("a picture", "matplotlib")
    from matplotlib.figure import Figure

    looks = _looks(chart)
    columns = min(len(chart.panels), MOST_COLUMNS)
    rows = -(-len(chart.panels) // columns)
    width = max(6.0, 5.0 * columns)
    names = _legend_columns(list(looks), width)
    # A line of the legend is 0.2 inches high; two take no more of the panels than these can do without.
    height = 4.2 * rows + 0.2 * max(0, -(-len(looks) // names) - 2)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    places: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    handles: dict[str, Any] = {}
    for axes, panel in zip(places, chart.panels, strict=False):
        handles = _draw_panel(axes, panel, looks) | handles
    for empty in places[len(chart.panels) :]:
        empty.remove()
    if len(looks) > 1:
        where: Any = "outside lower center"  # matplotlib's stubs list its strings only beside other types
        shown = [handles[label] for label in looks]
        figure.legend(shown, list(looks), loc=where, ncols=names, fontsize="small", handlelength=3, handleheight=1.2)
    return figure


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Returns how many columns of labels, at most 4, fit beside each other, each as wide as its longest.

    Args:
        labels: from top to bottom, column by column.
        width: of the picture in inches.

    >>> _legend_columns(["a design with a long name", "b", "c", "d"], 6.0), _legend_columns(["a" * 40, "b" * 40], 6.0)
    (4, 1)
    """
    for columns in range(min(4, len(labels)), 1, -1):
        rows, longer = divmod(len(labels), columns)  # the first columns may have one more
        starts = [column * rows + min(column, longer) for column in range(columns + 1)]
        longest = [max(map(len, labels[start:end])) for start, end in pairwise(starts)]
        # A letter is some 0.075 inches wide; a line and the space around it 0.7.
        if sum(0.075 * letters + 0.7 for letters in longest) <= width:
            return columns
    return 1


def _draw_panel(axes: Axes, panel: Panel, looks: dict[str, _Look]) -> dict[str, Any]:
    """Draws a panel, and returns what the legend shows of its series, by label."""
    names = list(dict.fromkeys(str(x) for series in panel.series for x in series.x))
    handles: dict[str, Any] = {}
    for place, series in enumerate(panel.series):
        look = looks[series.label]
        if panel.kind == "bars":
            width = 0.8 / len(panel.series)
            offset = (place - (len(panel.series) - 1) / 2) * width
            at = [names.index(str(x)) + offset for x in series.x]
            more: Any = {"color": look.colour, "hatch": look.hatch[1], "ec": "white"}
            drawn: Any = axes.bar(at, series.y, width, yerr=series.error, **more)
        elif series.role == "reference":
            [drawn] = axes.plot([float(x) for x in series.x], series.y, color=look.colour, linewidth=_BAND, zorder=1)
        else:
            drawn = axes.errorbar(
                [float(x) for x in series.x],
                series.y,
                yerr=series.error,
                color=look.colour,
                marker=look.marker[1],
                linestyle="none" if panel.kind == "points" else look.dash[1],
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
    return handles


def to_svg(chart: Chart) -> str:
    """Returns the chart as a picture in the text of a file."""
    file = io.StringIO()
    to_matplotlib(chart).savefig(file, format="svg")
    return file.getvalue()


def draw(chart: Chart, folder: Path, pictures: Sequence[Picture] = PICTURES) -> list[Path]:
    """Writes the chart in some formats, and returns where.

    Raises:
        ConfigError: matplotlib is not installed, or a picture cannot be written.
    """
    picture = to_matplotlib(chart)
    paths = [folder / f"{chart.name}.{ending}" for ending in pictures]
    for path in paths:
        try:
            picture.savefig(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}. Choose another place") from error
        picture.set_layout_engine(None)  # what the first has laid out stays: that takes as long as drawing does
    return paths
