"""Charts as data, drawn by matplotlib as pictures.

Series differ in colour, marker and dash, so that a chart can be read in grey. A paper's figures are black crosses; a
reference, such as a target, is a pale band below the others. Every `thinwire` process imports this and few draw, so
matplotlib is imported where something is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from thinwire.errors import ConfigError
from thinwire.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["lines", "points", "bars"]
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


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve, set of points, or group of bars.

    Args:
        label: in the legend.
        x, y: as many of each; the x of bars are names.
        error: half the height of each error bar.
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
    # A letter of a label is some 0.075 inches wide, a line and the space around it 0.7; a line is 0.2 inches high, and
    # two take no more of the panels than these can do without.
    names = max(1, min(4, len(looks), int(width / (0.075 * max(map(len, looks)) + 0.7))))
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
            more: Any = {"color": look.colour, "hatch": look.hatch, "ec": "white"}
            drawn: Any = axes.bar(at, series.y, width, yerr=series.error, **more)
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
    if panel.kind == "bars":
        turned = sum(map(len, names)) > 40
        axes.set_xticks(range(len(names)), names, rotation=30 if turned else 0, ha="right" if turned else "center")
    elif panel.x_log:
        axes.set_xscale("log")
        if ticks := panel.ticks():
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.set_xticks([], minor=True)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
    if panel.y_log and any(y > 0 for series in panel.series for y in series.y):
        axes.set_yscale("log")
    axes.grid(alpha=0.3, axis="y" if panel.kind == "bars" else "both")
    return handles


def to_svg(chart: Chart) -> str:
    """Returns the chart as a picture in the text of a file."""
    file = io.StringIO()
    to_matplotlib(chart).savefig(file, format="svg")
    return file.getvalue()


def draw(chart: Chart, *paths: Path) -> None:
    """Draws the chart into files, whose names' endings say the format.

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
