"""Where every value of a model lives among several servers.

An `Assignment` is checked when it is made: every value of every table lies on one server, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Partition:
    """The values `start` … `stop − 1` of a flattened table, on one server."""

    server: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.stop - self.start

    def label(self, table: str) -> str:
        """Returns the partition's name, as in messages and random streams.

        >>> Partition(0, 40, 80).label("fc.weight")
        'fc.weight[40:80]'
        """
        return f"{table}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Sized:
    """One table as placement sees it: its own name, its number of values, and its weight in bytes, as they travel."""

    name: str
    numel: int
    nbytes: float

    def __post_init__(self) -> None:
        if self.numel < 0 or not (math.isfinite(self.nbytes) and self.nbytes >= 0):
            raise ConfigError(
                f"table {self.name!r} with {self.numel} values and a weight of {self.nbytes} bytes; "
                "expected numbers that are finite and not negative"
            )

    def share(self, part: Partition) -> float:
        """Returns the weight of one of the table's partitions, in bytes: its part of the values."""
        # Exactly all of it for a whole table: loads that are equal would differ by rounding.
        return self.nbytes if part.numel == self.numel else self.nbytes * part.numel / self.numel


@dataclass(frozen=True)
class Assignment:
    """Where every value lives.

    Args:
        servers: how many servers there are.
        tables: the tables that were placed, in the model's order.
        partitions: for each table its partitions, in the order of its values. A table without values has none.

    Raises:
        ConfigError: partitions that overlap, leave a gap, are empty, or lie on a server that does not exist.

    Example:
        >>> tables = (Sized("weight", 10, 40.0), Sized("bias", 2, 8.0))
        >>> parts = ((Partition(0, 0, 5), Partition(1, 5, 10)), (Partition(1, 0, 2),))
        >>> placed = Assignment(2, tables, parts)
        >>> placed.loads()
        (20.0, 28.0)
    """

    servers: int
    tables: tuple[Sized, ...]
    partitions: tuple[tuple[Partition, ...], ...]

    def __post_init__(self) -> None:
        check_placeable(self.tables, self.servers)
        if len(self.partitions) != len(self.tables):
            raise ConfigError(f"{len(self.tables)} tables were to be placed and {len(self.partitions)} were")
        for table, parts in zip(self.tables, self.partitions, strict=True):
            end = 0
            for part in parts:
                if part.start != end or part.stop <= part.start or not 0 <= part.server < self.servers:
                    raise ConfigError(
                        f"table {table.name!r}: {part} after value {end}; partitions follow each other, none is empty, "
                        f"and servers are 0 to {self.servers - 1}"
                    )
                end = part.stop
            if end != table.numel:
                raise ConfigError(f"table {table.name!r}: {end} of its {table.numel} values are placed")

    def loads(self) -> tuple[float, ...]:
        """Returns the bytes on each server; a partition weighs its share of its table."""
        loads = [0.0] * self.servers
        for table, parts in zip(self.tables, self.partitions, strict=True):
            for part in parts:
                loads[part.server] += table.share(part)
        return tuple(loads)


def check_placeable(tables: Sequence[Sized], servers: int) -> None:
    """Raises ConfigError where there is no server, or where two tables have one name."""
    if servers < 1:
        raise ConfigError(f"{servers} servers; tables need at least 1")
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise ConfigError(f"two tables are called {next(name for name in names if names.count(name) > 1)!r}")
