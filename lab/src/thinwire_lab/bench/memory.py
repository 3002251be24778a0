"""What a method takes of memory at every rank, in bytes a parameter.

Libraries and compiled kernels take some hundred megabytes whatever the model is. So models of two sizes are trained,
and what the larger one takes more is divided by how many more parameters it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.errors import ConfigError, EngineError
from thinwire_lab.bench.cells import STATUS, Held, MemoryCell, MemoryRank
from thinwire_lab.bench.harness import Bench, Column, Figures, Tell, column
from thinwire_lab.bench.names import SITES, hook
from thinwire_lab.bench.options import ALONE, MemoryOptions
from thinwire_lab.bench.rank_group import RankGroup
from thinwire_lab.bench.roles import SILENCE_S
from thinwire_lab.jobs.grid import Measured


class MemoryRun(Figures, frozen=True, kw_only=True):
    """Bytes a parameter of the rank that has most: between two steps, and at most; and what no model changes."""

    held: float
    peak: float
    fixed_nbytes: float


_COLUMNS: Sequence[Column[Any, Any]] = (
    ("method", lambda cell, _run: cell.method),
    column("bytes a parameter", "held", "{:.1f}"),
    column("at most", "peak", "{:.1f}"),
    ("whatever the model", lambda _cell, run: f"{run.fixed_nbytes / 1e6:.0f} MB"),
)


@dataclass(kw_only=True)
class MemoryBench(MemoryOptions, Bench[MemoryCell, MemoryRun]):
    """Methods, one after the other."""

    kinds = (MemoryRun,)
    columns = _COLUMNS
    forms: ClassVar[Mapping[str, str]] = {"beyond plain DDP": "+.1f"}

    def __post_init__(self) -> None:
        for name in self.hooks:
            _check(name, self.ranks)
        if len(self.layers) != 2 or not 0 < self.layers[0] < self.layers[1]:
            raise ConfigError(f"models of {list(self.layers)} layers; needed are two numbers, the larger one last")
        if self.ranks < 2:
            raise ConfigError(f"{self.ranks} ranks; needed are 2")
        if not STATUS.exists():
            raise ConfigError(f"a process's memory is read from {STATUS}, which only Linux has")

    def cells(self) -> list[MemoryCell]:
        small, large = self.layers
        return [MemoryCell(method=name, ranks=self.ranks, layers=(small, large), seed=self.seed) for name in self.hooks]

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


def _check(name: str, ranks: int) -> None:
    """Raises ConfigError where a method cannot be measured here."""
    if name == ALONE:
        return
    named = hook(name)
    if named.sharded == "hsdp" and ranks % SITES:
        raise ConfigError(f"{name}: {ranks} ranks; {SITES} sites need a multiple of it")
    if named.served:
        raise ConfigError(f"method {name!r} needs a server; here ranks train among themselves")
