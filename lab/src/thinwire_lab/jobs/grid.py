"""A grid of cells: `run` measures each once, and writes its result to a file at once.

A subclass of `Grid` names the cells, measures one, and adds sections to the file. An interrupted grid continues from
its file: it measures only the cells without a good result.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from thinwire.errors import ConfigError, EngineError
from thinwire_lab.jobs.results import Results

C = TypeVar("C")
F = TypeVar("F", bound=msgspec.Struct)
Measured = Mapping[C, F]
"""The results of the cells so far."""
Tell = Callable[[str], None]
"""Takes a line on the progress."""
OnCell = Callable[[int, int, C], None]
"""Takes a cell's number, the number of cells, and the cell, before its measurement."""


class Grid(ABC, Generic[C, F]):
    """Cells, and how one is measured.

    Attributes:
        kinds: the classes of results.
        key_options: options that change results and that no cell holds.
    """

    kinds: ClassVar[Sequence[type[msgspec.Struct]]]
    key_options: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def cells(self) -> Sequence[C]:
        """Returns the grid: frozen dataclasses with all settings of a measurement."""

    @abstractmethod
    def measure(self, cell: C, before: Measured[C, F], tell: Tell) -> F:
        """Measures one cell, given the results so far."""

    def further(self, measured: Measured[C, F]) -> Sequence[C]:
        """Returns cells that depend on the results of those before them; all that are known, also measured ones."""
        return ()

    def failed(self, figures: F) -> bool:
        """Returns whether a measurement failed; a continued grid repeats it."""
        return False

    def outdated(self, cell: C, figures: F, before: Measured[C, F]) -> bool:
        """Returns whether to repeat a stored measurement, given the results of the cells before it."""
        return self.failed(figures)

    def lost(self, cell: C, error: EngineError) -> None:
        """Handles the error of a measurement without a result; raises it to end the grid."""
        raise error

    def sections(self, measured: Measured[C, F]) -> dict[str, Any]:
        """Returns further sections of the file."""
        return {}

    def key(self, cell: C) -> dict[str, Any]:
        """Returns the key of a cell's result, as read from the file."""
        options = {name: getattr(self, name) for name in self.key_options}
        key: dict[str, Any] = json.loads(json.dumps({**msgspec.to_builtins(cell), **options}))
        return key


def run(
    grid: Grid[C, F],
    results: Results[Any],
    measured: dict[C, F],
    *,
    on_cell: OnCell[C] = lambda number, total, cell: None,
    on_result: Callable[[C, F], None] = lambda cell, figures: None,
    tell: Tell = lambda text: None,
) -> None:
    """Measures the cells that `results` lacks, and puts every result into `measured` at once."""
    waiting = dict.fromkeys(grid.cells())  # equal cells are measured once
    if not waiting:
        raise ConfigError("there is nothing to measure: a list of names is empty")
    done: set[C] = set()
    while waiting:
        cell, number, total = next(iter(waiting)), len(done) + 1, len(done) + len(waiting)
        done.add(cell)
        key = grid.key(cell)
        figures = results.find(key)
        if new := figures is None or grid.outdated(cell, figures, measured):
            on_cell(number, total, cell)
            try:
                figures = grid.measure(cell, measured, tell)
            except EngineError as error:
                grid.lost(cell, error)
            else:
                results.add(key, figures)
                on_result(cell, figures)
        if figures is not None:
            measured[cell] = figures
        del waiting[cell]
        waiting = waiting or {each: None for each in grid.further(measured) if each not in done}
        if new or not waiting:
            results.save(grid.sections(measured))
