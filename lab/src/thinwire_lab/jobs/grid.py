"""A grid of cells: each is measured once, and its result is in a file as soon as it is there.

A subclass of `Grid` names the cells, measures one, and adds sections to the file. A grid that was interrupted goes on
from its file: only the cells of which the file holds no good result are measured.
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
OnCell = Callable[[int, int, C], None]
"""Takes a cell's number, how many there are, and the cell, before it is measured."""


class Grid(ABC, Generic[C, F]):
    """Cells, and how one is measured.

    Attributes:
        kinds: the classes of results.
        key_options: options that change what is measured and that no cell holds.
    """

    kinds: ClassVar[Sequence[type[msgspec.Struct]]]
    key_options: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def cells(self) -> Sequence[C]:
        """Returns the grid: frozen dataclasses that hold everything that tells one measurement from another."""

    @abstractmethod
    def measure(self, cell: C, before: Measured[C, F], tell: Tell) -> F:
        """Measures one cell, given what was measured before; `tell` takes words on progress."""

    def failed(self, figures: F) -> bool:
        """Returns whether a measurement failed; a failed one is repeated when the grid goes on."""
        return False

    def outdated(self, cell: C, figures: F, before: Measured[C, F]) -> bool:
        """Returns whether a stored result has to be measured again, given the results of the cells before it."""
        return self.failed(figures)

    def lost(self, cell: C, error: EngineError) -> None:
        """Takes the error of a measurement that came to nothing; raises it where the grid is not to go on."""
        raise error

    def sections(self, measured: Measured[C, F]) -> dict[str, Any]:
        """Returns what the file holds beside the results."""
        return {}

    def key(self, cell: C) -> dict[str, Any]:
        """Returns the key of a cell's result, as it comes back from the file."""
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
    """Measures the cells that `results` does not hold yet; `measured` has every result, also when it is interrupted."""
    cells = list(dict.fromkeys(grid.cells()))  # a cell that is named twice is measured once
    if not cells:
        raise ConfigError("there is nothing to measure: a list of names is empty")
    for number, cell in enumerate(cells, start=1):
        key = grid.key(cell)
        figures = results.find(key)
        if new := figures is None or grid.outdated(cell, figures, measured):
            on_cell(number, len(cells), cell)
            try:
                figures = grid.measure(cell, measured, tell)
            except EngineError as error:
                grid.lost(cell, error)
            else:
                results.add(key, figures)
                on_result(cell, figures)
        if figures is not None:
            measured[cell] = figures
        if new or number == len(cells):
            results.save(grid.sections(measured))
