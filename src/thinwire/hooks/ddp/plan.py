"""Who owns which values: every parameter is cut into slices, and each slice belongs to one rank.

The cut depends on names, sizes and the number of ranks alone, never on DDP's buckets: those are rebuilt after the
first step, and residuals must find their slices again. Large parameters are shared out evenly, so that every
bucket keeps every link busy; small ones go whole to whoever has least, because each slice costs a frame's header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPLIT_NUMEL = 4096
"""A slice of fewer values would spend a fifth of its bytes on the frame's header."""

ALIGN = 40
"""Slices begin at whole groups of five values and whole cache lines of packed bytes."""

_PLAIN_COST = 32
"""An uncompressed value weighs as much as this many compressed ones."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One trained tensor: its name, its number of values, and whether it travels uncompressed."""

    name: str
    numel: int
    plain: bool


@dataclass(frozen=True, slots=True)
class Slice:
    """Values start … stop of a flat parameter. `owner` is the rank that averages and re-encodes them."""

    parameter: str
    start: int
    stop: int
    owner: int

    @property
    def name(self) -> str:
        """As in messages and random streams."""
        return f"{self.parameter}[{self.start}:{self.stop}]"


def cut(parameters: Sequence[Parameter], world: int) -> dict[str, tuple[Slice, ...]]:
    """Returns the slices of every parameter, in order.

    Args:
        parameters: in an order that all ranks share.
        world: how many ranks there are.

    Example:
        >>> slices = cut([Parameter("big", 20_000, False), Parameter("bias", 10, True)], 2)
        >>> [(s.start, s.stop, s.owner) for s in slices["big"]], slices["bias"][0].owner
        ([(0, 10000, 0), (10000, 20000, 1)], 0)
    """
    load = [0] * world
    slices: dict[str, tuple[Slice, ...]] = {}
    for parameter in parameters:
        if parameter.numel >= SPLIT_NUMEL * world:
            share = -(-parameter.numel // (world * ALIGN)) * ALIGN
            edges = [min(rank * share, parameter.numel) for rank in range(world + 1)]
            slices[parameter.name] = tuple(
                Slice(parameter.name, edges[rank], edges[rank + 1], rank)
                for rank in range(world)
                if edges[rank] < edges[rank + 1]
            )
        else:
            owner = load.index(min(load))
            load[owner] += parameter.numel * (_PLAIN_COST if parameter.plain else 1)
            slices[parameter.name] = (Slice(parameter.name, 0, parameter.numel, owner),)
    return slices
