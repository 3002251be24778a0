"""The harness of every benchmark: a grid of cells, a measurement of each, and a file of results that can go on.

A benchmark is one `Bench`: its options, its grid, how one cell is measured, and the columns of its table. Cells are
measured one after the other, in rounds, and each result is stored as soon as it is there. Nothing here prints.
"""

from __future__ import annotations

import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from thinwire.engines.events import Event
from thinwire.errors import ConfigError
from thinwire.presentation.charts import Chart
from thinwire.presentation.tables import Table
from thinwire.quantities import number_text
from thinwire.transports.grpc import GrpcOptions
from thinwire_lab.jobs.results import Results
from thinwire_lab.workloads.recipe import Recipe


class Figures(msgspec.Struct, frozen=True, kw_only=True, tag_field="figures", tag=str.lower):
    """Base class of what is measured at a cell."""

    def row(self) -> dict[str, Any]:
        """Returns the figures as they are written into the file's rows."""
        return msgspec.structs.asdict(self)


C = TypeVar("C")
F = TypeVar("F", bound=Figures)
Measured = Mapping[C, Sequence[F]]
"""The results of each cell, one for each round so far."""
Column = tuple[str, Callable[[C, Sequence[F]], str]]
"""A title, and what to show of a cell and its results."""
Tell = Callable[[str], None]


class Bench(ABC, Generic[C, F]):
    """One benchmark. A subclass is a dataclass whose fields are the options of its command.

    Attributes:
        kinds: the classes of what is measured.
        defaults: of fields that cells got later, so that older files of results stay good.
        key_options: options that no cell holds, and with which something else is measured. What a file holds without
            one of them counts as measured with its default.
        columns: of its table.
        forms: how figures of `compared` are written, by title; others with two decimals.
        left: how many of them are text.
        rounds: how often the grid is gone through.
        serves: whether parameter servers are among what it starts, which need an extra.
    """

    kinds: ClassVar[Sequence[type[Figures]]]
    defaults: ClassVar[Mapping[str, Any]] = {}
    key_options: ClassVar[Sequence[str]] = ()
    columns: Sequence[Column[Any, Any]] = ()
    forms: ClassVar[Mapping[str, str]] = {}
    left: ClassVar[int] = 1
    rounds: int = 1
    serves: bool = False

    @abstractmethod
    def cells(self) -> Sequence[C]:
        """Returns the grid: frozen dataclasses that hold everything that tells one measurement from another."""

    @abstractmethod
    def measure(self, cell: C, before: Measured[C, F], tell: Tell) -> F:
        """Measures one cell.

        Args:
            cell: of the grid.
            before: what was measured before.
            tell: takes a word on progress, where measuring takes long.
        """

    def compared(self, cell: C, measured: Measured[C, F]) -> dict[str, float | None]:
        """Returns how a cell's results compare with others', by title; None while the others are missing."""
        return {}

    def tables(self, measured: Measured[C, F]) -> list[Table]:
        """Returns what was measured, for people."""
        header, lines = [title for title, _ in self.columns], []
        for cell, runs in measured.items():
            compared = self.compared(cell, measured)
            ratios = [number_text(ratio, self.forms.get(title, ".2f")) for title, ratio in compared.items()]
            lines.append([*(text(cell, runs) for _, text in self.columns), *ratios])
            header = [*(title for title, _ in self.columns), *compared]
        return [Table(header, lines, left=self.left)]

    def sections(self, measured: Measured[C, F]) -> dict[str, Any]:
        """Returns what the tables show, as data for the file of results: medians over the rounds."""
        return {"rows": [_row(cell, runs) | self.compared(cell, measured) for cell, runs in measured.items()]}

    def thin_link(self) -> tuple[str | None, str]:
        """Returns a limited link of the grid, which may need privileges, or None; and who is to shape it."""
        return None, "auto"

    def failed(self, figures: F) -> bool:
        """Whether a result is of a measurement that failed."""
        return False

    def outdated(self, cell: C, figures: F, before: Measured[C, F]) -> bool:
        """Whether a stored result is to be measured again.

        Args:
            cell: of the grid.
            figures: what is stored of it.
            before: what was measured, or found, of the cells before.
        """
        return self.failed(figures)

    def key(self, cell: C, number: int) -> dict[str, Any]:
        """Returns what a cell's result of one round is stored by, as it comes back from the file."""
        options = {name: getattr(self, name) for name in self.key_options}
        key: dict[str, Any] = json.loads(json.dumps({**msgspec.to_builtins(cell), **options, "round": number}))
        return key

    @classmethod
    def stored_defaults(cls) -> dict[str, Any]:
        """Returns what fields of a stored key count as where a file lacks them."""
        usual = {each.name: each.default for each in fields(cls)}  # type: ignore[arg-type]
        return {**cls.defaults, **{name: usual[name] for name in cls.key_options}}

    def line(self, cell: C, figures: F) -> str | None:
        """Returns a line about one result, to be shown at once; None where tables are enough."""
        return None

    def notes(self, measured: Measured[C, F]) -> list[str]:
        """Returns what is to be said below the tables."""
        return []

    def chart(self, measured: Measured[C, F]) -> Chart | None:
        """Returns what was measured as a chart, if there is one."""
        return None


def run(
    bench: Bench[C, F],
    results: Results[Any],
    measured: dict[C, list[F]],
    *,
    on_cell: Callable[[int, int, C], None] = lambda number, total, cell: None,
    on_result: Callable[[C, F], None] = lambda cell, figures: None,
    tell: Tell = lambda text: None,
) -> None:
    """Measures the cells that `results` does not hold yet, and stores each result as soon as it is there.

    Args:
        bench: what to measure.
        results: where results are stored.
        measured: filled with every cell and its results, also if measuring is interrupted.
        on_cell: called before each measurement with its number, how many there are, and the cell.
        on_result: called after each measurement.
        tell: takes words on progress.

    Raises:
        ConfigError: the grid is empty.
    """
    cells = list(dict.fromkeys(bench.cells()))  # what is named twice is measured once
    if not cells:
        raise ConfigError("there is nothing to measure: a list of names is empty")
    for number in range(len(cells) * bench.rounds):
        cell = cells[number % len(cells)]
        key = bench.key(cell, number // len(cells))
        figures = results.find(key)
        if figures is None or bench.outdated(cell, figures, measured):
            on_cell(number + 1, len(cells) * bench.rounds, cell)
            figures = bench.measure(cell, measured, tell)
            results.add(key, figures)
            on_result(cell, figures)
        measured.setdefault(cell, []).append(figures)
        results.save(bench.sections(measured))


def median(runs: Sequence[F], name: str) -> float:
    """Returns the median of one figure over the rounds."""
    return float(statistics.median(getattr(run, name) for run in runs))


def column(title: str, name: str, form: str = "{:.2f}") -> Column[Any, Any]:
    """Returns a column of one figure, its median over the rounds; – where it is None.

    Args:
        title: of the column.
        name: of the figure.
        form: what `str.format` makes of it.
    """

    def text(_cell: Any, runs: Sequence[Figures]) -> str:
        return "–" if getattr(runs[0], name) is None else form.format(median(runs, name))

    return title, text


def unusual(recipe: Recipe, *names: str) -> dict[str, Any] | None:
    """Returns what a recipe has in place of the usual, for the keys of results; None: nothing.

    Files from when a benchmark left these out of its training lack it, and hold another training under the same cell.

    Args:
        recipe: of a cell.
        names: of the fields that were left out.

    >>> from thinwire_lab.workloads.recipes import recipe
    >>> unusual(recipe("mlp", "digits"), "scales", "loss"), unusual(recipe("mlp-tanh", "digits"), "scales", "loss")
    (None, {'loss': 'squared-error'})
    """
    usual = {each.name: each.default for each in fields(Recipe)}
    return {name: getattr(recipe, name) for name in names if getattr(recipe, name) != usual[name]} or None


def milliseconds(title: str, name: str) -> tuple[Column[Any, Any], Column[Any, Any]]:
    """Returns two columns of a figure in seconds: its median over the rounds, and its extremes."""

    def extremes(_cell: Any, runs: Sequence[Figures]) -> str:
        values = [1e3 * getattr(run, name) for run in runs]
        return f"{min(values):.1f} … {max(values):.1f}"

    return (title, lambda cell, runs: f"{1e3 * median(runs, name):.1f}"), ("fastest … slowest", extremes)


def _row(cell: Any, runs: Sequence[Figures]) -> dict[str, Any]:
    middle = _middle([msgspec.to_builtins(run.row()) for run in runs])
    asked = msgspec.to_builtins(cell)
    # A figure that was not measured says nothing of what was asked under the same name, as of a learning rate.
    return {**asked, **{name: value for name, value in middle.items() if value is not None or name not in asked}}


def _middle(rounds: Sequence[Any]) -> Any:
    """Returns the median over the rounds, at each number; the first round's where others have another shape there.

    >>> _middle([{"at": [1.0, "a"]}, {"at": [5.0, "b"]}, {"at": [2.0, "c"]}]), _middle([[1], [2, 3]])
    ({'at': [2.0, 'a']}, [1])
    """
    first = rounds[0]
    if all(type(each) in (int, float) for each in rounds):
        return statistics.median(rounds)
    if isinstance(first, dict) and all(isinstance(each, dict) and each.keys() == first.keys() for each in rounds):
        return {name: _middle([each[name] for each in rounds]) for name in first}
    if isinstance(first, list) and all(isinstance(each, list) and len(each) == len(first) for each in rounds):
        return [_middle(at) for at in zip(*rounds, strict=True)]
    return first


@dataclass(frozen=True, slots=True)
class Stage:
    """What the command line of a benchmark's process gives it.

    Attributes:
        report: takes its events.
        listen: the address of a server.
        transport: options of its connections.
    """

    report: Callable[[Event], None]
    listen: str
    transport: GrpcOptions


class Role(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag=str.lower):
    """Base class of what one process of a benchmark does; its fields travel on the process's command line.

    A role has a method `play(stage)`, which does it and reports.
    """

    def command(self) -> list[str]:
        """Returns the `thinwire` command of the process."""
        return ["bench", "role", msgspec.json.encode(self).decode()]
