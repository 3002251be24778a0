"""The memory of a method at every rank, in bytes a parameter.

Libraries and compiled kernels take some hundred megabytes with any model. The benchmark trains models of two sizes, and
divides their difference in memory by their difference in parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.errors import ConfigError, EngineError
from thinwire_lab.bench.cells import SILENCE_S, STATUS, Held, HookCell, MemoryCell, MemoryRank
from thinwire_lab.bench.harness import Bench, Column, Figures, Tell, column
from thinwire_lab.bench.names import hook
from thinwire_lab.bench.options import ALONE, MemoryOptions
from thinwire_lab.bench.rank_group import RankGroup
from thinwire_lab.jobs.grid import Measured


class MemoryRun(Figures, frozen=True, kw_only=True):
    """Bytes a parameter of the rank with most: between two steps, and the maximum; and bytes of no parameter."""

    held: float
    peak: float
    fixed_nbytes: float


_COLUMNS: Sequence[Column[Any, Any]] = (
    ("method", lambda cell, _run: cell.method),
    column("bytes a parameter", "held", "{:.1f}"),
    column("at most", "peak", "{:.1f}"),
    ("with any model", lambda _cell, run: f"{run.fixed_nbytes / 1e6:.0f} MB"),
)


@dataclass(kw_only=True)
class MemoryBench(MemoryOptions, Bench[MemoryCell, MemoryRun]):
    """Methods, one after the other."""

    kinds = (MemoryRun,)
    columns = _COLUMNS
    forms: ClassVar[Mapping[str, str]] = {"beyond plain DDP": "+.1f"}

    def __post_init__(self) -> None:
        for name in self.hooks:
            if name != ALONE:
                HookCell(hook=name, model="mlp", data="digits", ranks=self.ranks)  # raises ConfigError
                if hook(name).served:
                    raise ConfigError(f"method {name!r} needs a server; here ranks train among themselves")
        if len(self.layers) != 2 or not 0 < self.layers[0] < self.layers[1]:
            raise ConfigError(f"models of {list(self.layers)} layers; needed are two numbers, the larger one last")
        if not STATUS.exists():
            raise ConfigError(f"a process's memory is read from {STATUS}, which only Linux has")

    def cells(self) -> list[MemoryCell]:
        return [self.filled(MemoryCell, method=name, layers=tuple(self.layers)) for name in self.hooks]

    def measure(self, cell: MemoryCell, before: Measured[MemoryCell, MemoryRun], tell: Tell) -> MemoryRun:
        small, large = (self._held(cell, layers) for layers in cell.layers)
        more = large.numel - small.numel
        held = (large.held - small.held) / more
        return MemoryRun(
            held=held,
            peak=(large.peak - small.peak) / more,
            fixed_nbytes=small.held - held * small.numel,
        )

    def _held(self, cell: MemoryCell, layers: int) -> Held:
        with RankGroup([Held]) as group:
            group.start([MemoryRank(cell=cell, layers=layers, rank=rank, **group.where) for rank in range(cell.ranks)])
            held = [event for _, event in group.engine.events(silence_s=SILENCE_S) if isinstance(event, Held)]
        if len(held) != cell.ranks:
            raise EngineError(f"{len(held)} of {cell.ranks} ranks reported their memory")
        return Held(
            numel=held[0].numel,
            held=max(each.held for each in held),
            peak=max(each.peak for each in held),
        )

    def compared(self, cell: MemoryCell, measured: Measured[MemoryCell, MemoryRun]) -> dict[str, float | None]:
        plain = next((run for at, run in measured.items() if at.method == "none"), None)
        return {"beyond plain DDP": None if plain is None else measured[cell].held - plain.held}

    def line(self, cell: MemoryCell, figures: MemoryRun) -> str:
        return f"{cell}: {figures.held:.1f} bytes a parameter, {figures.peak:.1f} at most"
