"""Charts as data, drawn by matplotlib as pictures.

Series differ in colour, marker and dash, so that a chart can be read in grey. A paper's figures are black crosses; a
reference, such as a target, is a pale band below the others. Every `thinwire` process imports this and few draw, so
matplotlib is imported where something is drawn.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from thinwire.errors import ConfigError
from thinwire.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["lines", "points", "bars", "spans"]
Role = Literal["ours", "paper", "reference"]

# Okabe & Ito's colours, which the colour-blind tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
# Eleven, so that the ninth series, whose colour and dash are the first's, has a marker or a hatch of its own.
_MARKERS = ("o", "s", "^", "D", "v", "p", "*", "h", "<", ">", "P")
_HATCHES = ("", "//", "xx", "..", "\\\\", "--", "||", "++", "oo", "O", "**")
_DASHES = ("-", "--", ":", "-.")
_PAPER, _REFERENCE = "#000000", "#C8C8C8"
_BAND = 5
"""Width of a reference, in points."""
_MARKS = 12
"""Markers on a line, however many points it has."""
MOST_COLUMNS = 3
"""Panels beside each other in a picture, which is then as wide as a screen."""
FEW_TICKS = 10
"""Labels that fit beside each other below a panel."""
_LETTER, _LINE = 0.075, 0.2
"""Width of a letter and height of a line, in inches."""
_NAME = 28
"""Letters of a line beside a bar."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve, set of points, or group of bars.

    Args:
        label: in the legend.
        x, y: as many of each; the x of bars are names.
        error: half the height of each error bar; of spans, half the length of each.
        role: whose numbers these are; a reference only helps to read the others, and is a line among points too.
    """

    label: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    error: Sequence[float] | None = None
    role: Role = "ours"

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), f"{self.label}: {len(self.y)} y, {len(self.x)} x"


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

    def names(self) -> list[str]:
        """Returns the x of all series, as text, each once."""
        return list(dict.fromkeys(str(x) for series in self.series for x in series.x))

    def beside(self) -> list[str]:
        """Returns the names beside bars that lie, in lines: where there is no room for them below."""
        names = self.names() if self.kind == "bars" else []
        return [_wrapped(each, _NAME) for each in names] if sum(map(len, names)) > 40 else []

    def ticks(self) -> list[float]:
        """Returns the labels of a logarithmic x axis: its own values where they are few and whole, else none.

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
        panels: from left to right, in rows. Series with the same label look the same in all.
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
    colour: str
    marker: str
    dash: str
    hatch: str


def _looks(chart: Chart) -> dict[str, _Look]:
    """Returns how each series looks, by label: from its place in the legend and its role."""
    roles = {series.label: series.role for panel in chart.panels for series in panel.series}
    looks = {}
    for index, label in enumerate(chart.labels()):
        look = _Look(*(every[index % len(every)] for every in (_COLOURS, _MARKERS, _DASHES, _HATCHES)))
        if roles[label] == "paper":
            look = look._replace(colour=_PAPER, marker="x")
        elif roles[label] == "reference":
            look = look._replace(colour=_REFERENCE)
        looks[label] = look
    return looks


def _wrapped(name: str, letters: int) -> str:
    """Returns a name in lines of so many letters at most; names of tensors have no blanks to break at.

    >>> _wrapped("blocks.0.weight", 8)
    'blocks.0\\n.weight'
    """
    return "\n".join(name[at : at + letters] for at in range(0, len(name), letters))


def to_matplotlib(chart: Chart, columns: int = MOST_COLUMNS) -> Figure:
    """Returns the chart as a picture: panels in rows, and one legend below all.

    Args:
        chart: to draw.
        columns: panels beside each other, at most.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require("a picture", "matplotlib")
    from matplotlib.figure import Figure

    looks = _looks(chart)
    columns = min(len(chart.panels), columns)
    rows = -(-len(chart.panels) // columns)
    width = max(6.0, 5.0 * columns)
    # A line and the space around it are 0.7 inches wide. Two lines of labels take no more of the panels than these can
    # do without.
    labels = [_wrapped(each, int((width - 0.7) / _LETTER)) for each in looks]
    longest = max(len(line) for each in labels for line in each.split("\n"))
    names = max(1, min(4, len(looks), int(width / (_LETTER * longest + 0.7))))
    lines = sum(each.count("\n") + 1 for each in labels) / names
    bars = max(_LINE * (sum(each.count("\n") + 1 for each in panel.beside())) for panel in chart.panels)
    height = rows * max(4.2, 1.2 + bars) + _LINE * max(0, math.ceil(lines) - 2)
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
        figure.legend(shown, labels, loc=where, ncols=names, fontsize="small", handlelength=3, handleheight=1.2)
    return figure


def _draw_panel(axes: Axes, panel: Panel, looks: dict[str, _Look]) -> dict[str, Any]:
    """Draws a panel, and returns what the legend shows of its series, by label."""
    names, beside = panel.names(), panel.beside()
    handles: dict[str, Any] = {}
    for place, series in enumerate(panel.series):
        look = looks[series.label]
        if panel.kind == "bars":
            width = 0.8 / len(panel.series)
            offset = (place - (len(panel.series) - 1) / 2) * width
            at = [names.index(str(x)) + offset for x in series.x]
            more: Any = {"color": look.colour, "hatch": look.hatch, "ec": "white"}
            drawn: Any
            if beside:
                drawn = axes.barh(at, series.y, width, xerr=series.error, **more)
            else:
                drawn = axes.bar(at, series.y, width, yerr=series.error, **more)
        elif panel.kind == "spans":
            error = series.error or [0.0] * len(series.y)
            left = [float(str(x)) - half for x, half in zip(series.x, error, strict=True)]
            lengths = [2 * half for half in error]
            drawn = axes.barh(list(series.y), lengths, 0.7, left, color=look.colour, hatch=look.hatch, ec="white")
        elif series.role == "reference":
            [drawn] = axes.plot([float(x) for x in series.x], series.y, color=look.colour, linewidth=_BAND, zorder=1)
        else:
            points = panel.kind == "points"
            drawn = axes.errorbar(
                [float(x) for x in series.x],
                series.y,
                yerr=series.error,
                color=look.colour,
                marker=look.marker,
                linestyle="none" if points else look.dash,
                markevery=1 if points else max(1, len(series.y) // _MARKS),
                markersize=5,
                capsize=2,
            )
        handles.setdefault(series.label, drawn)
    if beside:
        axes.set_yticks(range(len(names)), beside, fontsize="small")
        axes.invert_yaxis()  # the first name is the uppermost
    elif panel.kind == "spans":
        rows = sorted({y for series in panel.series for y in series.y})
        axes.set_yticks(rows, [f"{y:g}" for y in rows])
        axes.invert_yaxis()
    elif panel.kind == "bars":
        axes.set_xticks(range(len(names)), names)
    elif panel.x_log:
        axes.set_xscale("log")
        if ticks := panel.ticks():
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.set_xticks([], minor=True)
    x_label, y_label = (panel.y_label, panel.x_label) if beside else (panel.x_label, panel.y_label)
    axes.set(xlabel=x_label, ylabel=y_label, title=panel.title)
    if panel.y_log and any(y > 0 for series in panel.series for y in series.y):
        (axes.set_xscale if beside else axes.set_yscale)("log")
    axes.grid(alpha=0.3, axis="both" if panel.kind != "bars" else "x" if beside else "y")
    return handles


def to_svg(chart: Chart, columns: int = MOST_COLUMNS) -> str:
    """Returns the chart as a picture in the text of a file; arguments as for `to_matplotlib`."""
    file = io.StringIO()
    to_matplotlib(chart, columns).savefig(file, format="svg")
    return file.getvalue()


def draw(chart: Chart, *paths: Path) -> None:
    """Draws the chart into files; the ending of each name gives the format.

    Raises:
        ConfigError: matplotlib is not installed, or a picture cannot be written.
    """
    picture = to_matplotlib(chart)
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.savefig(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}. Choose another place") from error
        picture.set_layout_engine(None)  # the first one's layout stays: it takes as long as drawing does
