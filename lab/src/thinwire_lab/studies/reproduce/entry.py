"""A table or figure of a paper: its place in the catalogue, the cells it needs, and how they are shown.

A *cell* is one run: a frozen struct of plain values that makes itself. A *finding* is what a cell came to. Entries that
need the same runs ask for equal cells.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, Literal, get_args

import msgspec

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire.quantities import counted

Scale = Literal["tiny", "quick", "full"]
"""`tiny` is for tests and says nothing; `quick` takes at most ten minutes a paper on two cores; `full` is for results.
"""

Status = Literal["done", "scaled", "impossible", "drawing"]
"""`done`: as in the paper. `scaled`: a smaller model, data set or cluster. `impossible`: cannot be had here.
`drawing`: explains the method, and measures nothing."""

OnProgress = Callable[[float, str], None]  # takes the share of a cell that is done, 0 … 1, and a few words


class Finding(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base class of the results of a cell, as they are stored."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base class of one run: its settings, all of them JSON and hashable, and how it is made."""

    timed: ClassVar[bool] = True  # whether its finding holds seconds of this machine, so that nothing may run beside it

    finding: ClassVar[type[Finding]]  # what it comes to

    @abstractmethod
    def run(self, on_progress: OnProgress) -> Finding:
        """Makes the run, and tells its progress; raises ThinwireError where it fails."""

    def impossible(self, finding: Any) -> str | None:
        """Returns what a finding says that cannot be, as other work on the machine makes it; None of any other."""
        return None

    def __str__(self) -> str:
        told = ((each.name, getattr(self, each.name), each.default) for each in msgspec.structs.fields(self))
        return ", ".join(f"{name} {value}" for name, value, default in told if value != default)

    def key(self) -> dict[str, Any]:
        """Returns the cell as JSON, under which its finding is stored."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

    def seed_index(self) -> int:
        """Returns which of the runs it is that differ in their seed alone, from 0; a cell without a seed is the 0th."""
        return int(self.key().get("seed", 0))


class Found(dict[Any, Any]):
    """Cells with their findings, in the order in which an entry asks for them."""

    def of(self, kind: type[Cell]) -> Found:
        return Found({cell: finding for cell, finding in self.items() if isinstance(cell, kind)})

    def where(self, **fields: Any) -> Found:
        """Returns those whose cells have these values."""
        return Found({c: f for c, f in self.items() if all(getattr(c, name) == v for name, v in fields.items())})

    def each(self, name: str) -> list[Any]:
        return list(dict.fromkeys(getattr(cell, name) for cell in self))

    def figures(self, figure: Callable[[Any], float]) -> list[float]:
        return [figure(finding) for finding in self.values()]

    def mean(self, figure: Callable[[Any], float]) -> float:
        return fmean(self.figures(figure))

    @property
    def first(self) -> tuple[Any, Any]:
        return next(iter(self.items()))

    @property
    def seeds(self) -> str:
        """How many seeds the cells have, in words."""
        return counted(len(self.each("seed")), "seed")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The tables, charts and notes of an entry."""

    setting: str  # what was run, in one or two sentences; it stands under every chart
    tables: Sequence[Table] = ()  # with the paper's number, ours, and a remark where they differ
    charts: Sequence[Chart] = ()  # drawn in the page and as pictures
    notes: Sequence[str] = ()  # paragraphs that explain what differs from the paper


@dataclass(frozen=True, kw_only=True)
class Study:
    """How an entry is made."""

    cells: Callable[[Scale], Sequence[Any]]  # returns the runs of a scale
    show: Callable[[Found], Shown]  # makes tables and charts from the findings of all cells of one scale
    links: bool = False  # whether runs need thin links, for which the command may have to start again as another user

    @property
    def kinds(self) -> tuple[type[Finding], ...]:
        """The classes of the findings that its cells come to, at any scale."""
        scales: tuple[Scale, ...] = get_args(Scale)
        return tuple(dict.fromkeys(cell.finding for scale in scales for cell in self.cells(scale)))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One table or figure of a paper."""

    paper: str  # its short name, as in `3lc`
    item: str  # as in `table-1` or `figure-5.4`
    shows: str  # what it shows, in a few words
    status: Status  # whether and how it can be had here
    why: str = ""  # what is scaled and what that changes, or why it cannot be had
    minutes: float = 0.0  # of the quick scale on two idle cores; entries that share runs each count them
    study: Study | None = field(default=None, repr=False)  # how it is made; None where it is not

    def __post_init__(self) -> None:
        assert (self.study is not None) == (self.status in ("done", "scaled")), f"{self.id}: {self.status}"
        assert self.why or self.status == "done", f"{self.id} does not say why"

    @property
    def id(self) -> str:
        """The entry's name on the command line."""
        return f"{self.paper}-{self.item}"

    @property
    def title(self) -> str:
        """The heading, as in `Figure 6: compressed size by step`."""
        return f"{self.item.replace('-', ' ').capitalize()}: {self.shows}"


Made = tuple[str, str, float, Callable[[Scale], Sequence[Any]], Callable[[Found], Shown]]
"""An item, what it shows, its minutes, and how it is made."""


def scaled(paper: str, why: str, *items: Made, links: bool = False) -> tuple[Entry, ...]:
    """Returns the entries of a paper's items, for which something is scaled."""
    return tuple(
        Entry(
            paper=paper,
            item=item,
            shows=shows,
            status="scaled",
            why=why,
            minutes=minutes,
            study=Study(cells=cells, show=show, links=links),
        )
        for item, shows, minutes, cells, show in items
    )


def chart(name: str, caption: str, series: Sequence[Series], x: str, y: str, **more: Any) -> Chart:
    panel = Panel(title="", x_label=x, y_label=y, series=series, **more)
    return Chart(name=name, caption=caption, panels=[panel])
