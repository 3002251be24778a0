"""A new placement: a layer's weight, bias and norms stay together, so that one shard completes a whole layer.

A policy sees names and sizes and says where everything goes; that nothing is lost or doubled is checked for it.
With the entry point of docs/extending.md installed: `thinwire train --placement together --servers 2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.policies.assignment import Assignment, Partition, Sized, check_placeable
from thinwire.policies.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Together(Placement):
    """The heaviest layer that is left goes, whole, to the least loaded server."""

    id: ClassVar[str] = "together"

    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        check_placeable(tables, servers)
        layers: dict[str, list[Sized]] = {}
        for table in tables:
            layers.setdefault(table.name.rpartition(".")[0], []).append(table)
        loads, server_of = [0.0] * servers, {}
        for name in sorted(layers, key=lambda name: -sum(table.nbytes for table in layers[name])):
            server_of[name] = loads.index(min(loads))
            loads[server_of[name]] += sum(table.nbytes for table in layers[name])
        homes = [(server_of[table.name.rpartition(".")[0]], table.numel) for table in tables]
        return Assignment(servers, tuple(tables), tuple((Partition(s, 0, n),) if n else () for s, n in homes))
