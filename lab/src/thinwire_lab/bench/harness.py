"""The base of every benchmark: a grid with results as tables, notes and charts. This file prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec

from thinwire.presentation.charts import Chart
from thinwire.presentation.tables import Table
from thinwire.quantities import number_text
from thinwire_lab.jobs.grid import Grid, Measured
from thinwire_lab.jobs.grid import Tell as Tell


class Figures(msgspec.Struct, frozen=True, kw_only=True, tag_field="figures", tag=str.lower):
    """Base class of a cell's results."""


C = TypeVar("C")
F = TypeVar("F", bound=Figures)
D = TypeVar("D")
Column = tuple[str, Callable[[C, F], str]]
"""A title, and the text of a cell and its result."""


class Bench(Grid[C, F], Generic[C, F]):
    """One benchmark. A subclass is a dataclass; its fields are the options of the command.

    Attributes:
        columns: columns of its table.
        forms: formats of `compared`'s figures by title; by default two decimals.
        left: number of text columns.
        serves: whether it starts parameter servers, which need an extra.
    """

    columns: Sequence[Column[Any, Any]] = ()
    forms: ClassVar[Mapping[str, str]] = {}
    left: ClassVar[int] = 1
    serves: bool = False

    def filled(self, kind: Callable[..., D], **own: Any) -> D:
        """Returns a dataclass whose fields have the values of the options with their names, or their `own`."""
        shared = {each.name: getattr(self, each.name) for each in fields(cast(Any, kind)) if hasattr(self, each.name)}
        return kind(**shared | own)

    def compared(self, cell: C, measured: Measured[C, F]) -> dict[str, float | None]:
        """Returns a cell's ratios to other cells, by title; None while those are missing."""
        return {}

    def tables(self, measured: Measured[C, F]) -> list[Table]:
        """Returns the results as tables."""
        header, lines = [title for title, _ in self.columns], []
        for cell, run in measured.items():
            compared = self.compared(cell, measured)
            ratios = [number_text(ratio, self.forms.get(title, ".2f")) for title, ratio in compared.items()]
            lines.append([*(text(cell, run) for _, text in self.columns), *ratios])
            header = [*(title for title, _ in self.columns), *compared]
        return [Table(header, lines, left=self.left)]

    def sections(self, measured: Measured[C, F]) -> dict[str, Any]:
        """Returns a row for each cell, the tables and the notes, for the file of results."""
        rows = [_row(cell, run) | self.compared(cell, measured) for cell, run in measured.items()]
        return {"rows": rows, "tables": self.tables(measured), "notes": self.notes(measured)}

    def thin_link(self) -> tuple[str | None, str]:
        """Returns a limited link of the grid, which may need privileges, or None; and the kind of shaping."""
        return None, "auto"

    def line(self, cell: C, figures: F) -> str | None:
        """Returns a line about one result, which the command shows at once; None leaves it to the tables."""
        return None

    def notes(self, measured: Measured[C, F]) -> list[str]:
        """Returns sentences below the tables."""
        return []

    def chart(self, measured: Measured[C, F]) -> Chart | None:
        """Returns the results as a chart, if there is one."""
        return None


def median(runs: Sequence[F], name: str) -> float:
    """Returns the median of one figure over runs."""
    return float(statistics.median(getattr(run, name) for run in runs))


def column(title: str, name: str, form: str = "{:.2f}") -> Column[Any, Any]:
    """Returns a column of one figure in the form of `str.format`; – where it is None or missing."""

    def text(_cell: Any, run: Figures) -> str:
        value = getattr(run, name, None)
        return "–" if value is None else form.format(value)

    return title, text


def _row(cell: Any, run: Figures) -> dict[str, Any]:
    asked, found = msgspec.to_builtins(cell), msgspec.to_builtins(msgspec.structs.asdict(run))
    # A missing figure does not replace the option of the same name, such as a learning rate.
    return {**asked, **{name: value for name, value in found.items() if value is not None or name not in asked}}
