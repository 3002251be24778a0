"""Placement in studies: a policy that only the papers compare, and how even an assignment is."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.policies.assignment import Assignment, Partition, Sized, check_placeable
from thinwire.policies.naming import check_count
from thinwire.policies.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Rows(Placement):
    """Tables cut into rows of one size, counted through the model: row i on server i mod N (GeePS; Wu 2018, §2.3.1).

    GeePS is "Scalable deep learning on distributed GPUs with a GPU-specialized parameter server" (Cui et al., 2016).
    Each server holds as many rows of every table as there, but in one part, since each part has a frame.

    Args:
        size: values of a row; 128 in GeePS's code. The last row of a table may be shorter.

    Example:
        >>> placed = Rows(size=4).place([Sized("a", 18, 18.0), Sized("b", 8, 8.0)], 2)
        >>> [[(part.server, part.start, part.stop) for part in parts] for parts in placed.partitions]
        [[(0, 0, 12), (1, 12, 18)], [(1, 0, 4), (0, 4, 8)]]
    """

    id: ClassVar[str] = "rows"
    size: int = 128

    def __post_init__(self) -> None:
        check_count(f"{self.id}: size", self.size, 1)

    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        check_placeable(tables, servers)
        partitions: list[tuple[Partition, ...]] = []
        before = 0
        for table in tables:
            rows = -(-table.numel // self.size)
            parts, start = [], 0
            for turn in range(min(rows, servers)):
                own = -(-(rows - turn) // servers)
                stop = min(start + own * self.size, table.numel)
                parts.append(Partition((before + turn) % servers, start, stop))
                start = stop
            partitions.append(tuple(parts))
            before += rows
        return Assignment(servers, tuple(tables), tuple(partitions))


def deviation(placed: Assignment) -> float:
    """Returns the standard deviation of the servers' loads, in bytes, with N − 1 as in Wu 2018, ch. 5."""
    return statistics.stdev(placed.loads()) if placed.servers > 1 else 0.0


def variation(placed: Assignment) -> float:
    """Returns the deviation as a percentage of the mean load (Wu 2018, figure 5.3); 0 without any load."""
    mean = statistics.fmean(placed.loads())
    return 100 * deviation(placed) / mean if mean else 0.0


def digest(placed: Assignment) -> str:
    """Returns 32 hexadecimal digits of the decision: servers, tables, sizes, partitions, and no weights."""
    decision = [
        placed.servers,
        [[table.name, table.numel] for table in placed.tables],
        [[[part.server, part.start, part.stop] for part in parts] for parts in placed.partitions],
    ]
    return hashlib.blake2b(json.dumps(decision).encode(), digest_size=16).hexdigest()
