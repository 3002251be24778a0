"""Placement policies: they decide once, before training, which server or rank holds which values.

A policy sees every table's size and weight and returns an `Assignment`: for each table the partitions that cover it,
each on one server. The weight is the caller's: bytes, or bytes as they are predicted to travel. The decision depends
on its arguments alone and ties are broken by number, so that every process that decides for itself decides the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.errors import ConfigError
from thinwire.policies.assignment import Assignment, Partition, Sized, check_placeable
from thinwire.policies.naming import Family, check_count
from thinwire.quantities import counted

_ALIGN = 40
"""Values: whole groups of five, and whole cache lines of packed bytes."""


@dataclass(frozen=True, kw_only=True)
class Placement(ABC):
    """A placement policy: derive from it, give it an id, and decide in `place`."""

    id: ClassVar[str]

    @abstractmethod
    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        """Returns where the values of `tables`, in the model's order, live among `servers` servers.

        Raises:
            ConfigError: no server, or two tables of one name.
        """


@dataclass(frozen=True, kw_only=True)
class RoundRobin(Placement):
    """Table i on server i mod N (TensorFlow's default; Wu 2018, §2.3.1, code 4.1)."""

    id: ClassVar[str] = "round-robin"

    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        check_placeable(tables, servers)
        parts = [_cut(table.numel, [index % servers]) for index, table in enumerate(tables)]
        return Assignment(servers, tuple(tables), tuple(parts))


@dataclass(frozen=True, kw_only=True)
class Greedy(Placement):
    """Each table, in the model's order, on the least loaded server (TensorFlow's other strategy; Wu 2018, §2.3.1)."""

    id: ClassVar[str] = "greedy"

    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        return _deal(tables, servers, range(len(tables)), [1] * len(tables))


@dataclass(frozen=True, kw_only=True)
class Heuristic(Placement):
    """The largest table that is left on the least loaded server (Wu 2018, §2.3.1, algorithm 2).

    That is Graham's longest-processing-time rule: the fullest server carries at most 4/3 − 1/(3N) of the best
    placement's fullest ("Bounds on multiprocessing timing anomalies", 1969).

    Example:
        >>> Heuristic().place([Sized(str(n), n, n) for n in range(2, 9)], 3).loads()
        (13.0, 11.0, 11.0)
    """

    id: ClassVar[str] = "heuristic"

    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        order = sorted(range(len(tables)), key=lambda index: (-tables[index].nbytes, index))
        return _deal(tables, servers, order, [1] * len(tables))


@dataclass(frozen=True, kw_only=True)
class Uniform(Placement):
    """Every table split evenly over all servers (Wu 2018, ch. 5), or over as many as parts of `min_numel` allow.

    Tables with fewer parts than servers go to the least loaded servers, those of the heaviest parts first.

    Args:
        min_numel: the fewest values of a part, `min` for short: each part has a frame with a header. 0 is Wu's own
            split, without a bound. From 40 on, parts begin at multiples of 40.

    Example:
        >>> Uniform(min_numel=4).place([Sized("a", 8, 8.0), Sized("b", 6, 6.0)], 2).partitions
        ((Partition(server=0, start=0, stop=4), Partition(server=1, start=4, stop=8)), \
(Partition(server=0, start=0, stop=6),))
    """

    id: ClassVar[str] = "uniform"
    min_numel: int = 0

    def __post_init__(self) -> None:
        check_count(f"{self.id}: min_numel", self.min_numel, 0)

    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        room = [table.numel // self.min_numel if self.min_numel else servers for table in tables]
        counts = [max(1, min(servers, parts)) for parts in room]
        order = sorted(range(len(tables)), key=lambda index: (-tables[index].nbytes / counts[index], index))
        return _deal(tables, servers, order, counts, _ALIGN if self.min_numel >= _ALIGN else 1)


POLICIES: Family[Placement] = Family(
    "placement",
    # The first is the default.
    {kind.id: kind for kind in (Heuristic, RoundRobin, Greedy, Uniform)},
    Placement,
    short={"min": "min_numel"},
)


def placement(name: str | Placement) -> Placement:
    """Returns a policy by name, as in `heuristic` or `uniform[min=1024]`.

    Raises:
        ConfigError: an unknown policy or option, listing what there is.

    Example:
        >>> placement("uniform[min=1024]")
        Uniform(min_numel=1024)
    """
    return name if isinstance(name, Placement) else POLICIES.make(name)


def check_none_idle(placing: Placement, placed: Assignment) -> None:
    """Raises ConfigError for a server without parameters: no update moves it from step 0, so nothing can be resumed.

    Args:
        placing: the policy, which the error names.
        placed: what it decided for a model's parameters; a table without values counts for the first server.
    """
    holding = {part.server for parts in placed.partitions for part in parts or (Partition(0, 0, 0),)}
    if idle := placed.servers - len(holding):
        raise ConfigError(
            f"{idle} of {placed.servers} servers would hold no parameters, as {placing.id!r} places this model; take "
            f"{counted(len(holding), 'server')}, or a placement that divides tensors, such as 'uniform[min=1]'"
        )


def _deal(
    tables: Sequence[Sized], servers: int, order: Iterable[int], counts: Sequence[int], align: int = 1
) -> Assignment:
    """Deals tables out in `order`, table i as `counts[i]` even parts on the least loaded servers.

    Equal loads go to the lower number.
    """
    check_placeable(tables, servers)
    loads, partitions = [0.0] * servers, [tuple[Partition, ...]()] * len(tables)
    for index in order:
        lightest = sorted(range(servers), key=loads.__getitem__)[: counts[index]]
        partitions[index] = _cut(tables[index].numel, sorted(lightest), align)
        for part in partitions[index]:
            loads[part.server] += tables[index].share(part)
    return Assignment(servers, tuple(tables), tuple(partitions))


def _cut(numel: int, among: Sequence[int], align: int = 1) -> tuple[Partition, ...]:
    """Cuts a table evenly over some servers, at multiples of `align` values."""
    edges = [numel * piece // len(among) // align * align for piece in range(len(among))]
    ranges = zip(among, edges, [*edges[1:], numel], strict=True)
    return tuple(Partition(*part) for part in ranges if part[1] < part[2])
