"""A table or figure of a paper: its place in the catalogue, its cells, and their presentation.

A *cell* is one run: a frozen struct of plain values with a method `run`. A *finding* is the result of a cell. Entries
that need the same runs have equal cells.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Literal, get_args

import msgspec

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire.quantities import counted
from thinwire_lab.jobs.grid import Tell

Scale = Literal["tiny", "quick", "full"]
"""`tiny` is for tests; `quick` takes at most ten minutes a paper on two cores; `full` is for results."""

Status = Literal["done", "scaled", "impossible", "drawing"]
"""`done`: as in the paper. `scaled`: a smaller model, data set or cluster. `impossible`: not possible here.
`drawing`: explains the method, without measurements."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base class of the stored results of a cell."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base class of one run: its settings, all of them JSON and hashable, and the run itself."""

    finding: ClassVar[type[Finding]]  # the class of its results

    @abstractmethod
    def run(self, tell: Tell) -> Finding:
        """Makes the run and tells its progress; raises ThinwireError if it fails."""

    def impossible(self, finding: Any) -> str | None:
        """Returns why a finding is impossible, as on a loaded machine; None for a possible one."""
        return None

    def __str__(self) -> str:
        settings = ((each.name, getattr(self, each.name), each.default) for each in msgspec.structs.fields(self))
        return ", ".join(f"{name} {value}" for name, value, default in settings if value != default)

    def key(self) -> dict[str, Any]:
        """Returns the cell as JSON, the key of its finding."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


class Found(dict[Any, Any]):
    """Cells with their findings, in an entry's order."""

    def of(self, kind: type[Cell]) -> Found:
        return Found({cell: finding for cell, finding in self.items() if isinstance(cell, kind)})

    def where(self, **fields: Any) -> Found:
        """Returns the cells with these values."""
        return Found({c: f for c, f in self.items() if all(getattr(c, name) == v for name, v in fields.items())})

    def each(self, name: str) -> list[Any]:
        return list(dict.fromkeys(getattr(cell, name) for cell in self))

    def figures(self, figure: Callable[[Any], float]) -> list[float]:
        return [figure(finding) for finding in self.values()]

    def mean(self, figure: Callable[[Any], float]) -> float:
        return fmean(self.figures(figure))

    def steps(self, values: Callable[[Any], Sequence[float]]) -> list[float]:
        """Returns the means over cells of values by step."""
        return [fmean(step) for step in zip(*map(values, self.values()), strict=True)]

    @property
    def first(self) -> tuple[Any, Any]:
        return next(iter(self.items()))

    @property
    def seeds(self) -> str:
        """The number of the cells' seeds, as text."""
        return counted(len(self.each("seed")), "seed")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The tables, charts and notes of an entry."""

    setting: str  # the runs in one or two sentences, which stand under every chart
    tables: Sequence[Table] = ()  # with the paper's number and ours
    charts: Sequence[Chart] = ()  # drawn in the page and as pictures
    notes: Sequence[str] = ()  # paragraphs on the differences to the paper


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One table or figure of a paper; without cells if it is not made here."""

    paper: str  # its short name, as in `3lc`
    item: str  # as in `table-1` or `figure-5.4`
    shows: str  # its content in a few words
    status: Status
    why: str = ""  # the scaling and its effects, or the reason why it is impossible
    minutes: float = 0.0  # time of the quick scale on two idle cores; entries that share runs each count them
    cells: Callable[[Scale], Sequence[Any]] = lambda scale: ()  # returns the runs of a scale
    show: Callable[[Found], Shown] = lambda found: Shown(setting="")  # tables and charts, from one scale's findings
    links: bool = False  # whether runs need thin links, which may need a user namespace

    def __post_init__(self) -> None:
        assert self.why or self.status == "done", f"{self.id} does not say why"

    @property
    def made(self) -> bool:
        """Whether it is made here."""
        return self.status in ("done", "scaled")

    @property
    def kinds(self) -> tuple[type[Finding], ...]:
        """The classes of its findings, at any scale."""
        scales: tuple[Scale, ...] = get_args(Scale)
        return tuple(dict.fromkeys(cell.finding for scale in scales for cell in self.cells(scale)))

    @property
    def id(self) -> str:
        """The entry's name on the command line."""
        return f"{self.paper}-{self.item}"

    @property
    def title(self) -> str:
        """The heading, as in `Figure 6: compressed size by step`."""
        return f"{self.item.replace('-', ' ').capitalize()}: {self.shows}"


Made = tuple[str, str, float, Callable[[Scale], Sequence[Any]], Callable[[Found], Shown]]
"""An item, its content, its minutes, its cells and its presentation."""


def scaled(paper: str, why: str, *items: Made, links: bool = False) -> tuple[Entry, ...]:
    """Returns the scaled entries of a paper's items."""
    return tuple(
        Entry(
            paper=paper,
            item=item,
            shows=shows,
            status="scaled",
            why=why,
            minutes=minutes,
            cells=cells,
            show=show,
            links=links,
        )
        for item, shows, minutes, cells, show in items
    )


def percent(finding: Any) -> float:
    """Returns a finding's accuracy in percent."""
    return 100.0 * float(finding.accuracy)


def chart(name: str, caption: str, series: Sequence[Series], x: str, y: str, **more: Any) -> Chart:
    panel = Panel(title="", x_label=x, y_label=y, series=series, **more)
    return Chart(name=name, caption=caption, panels=[panel])
