"""Which server, or which rank, holds which values: placement policies, decided once, before training.

A policy sees every table's size and weight and returns an `Assignment`: for each table the partitions that cover it,
each on one server. The weight is the caller's: bytes, or bytes as they are predicted to travel. The decision depends
on its arguments alone and ties are broken by number, so that every process that decides for itself decides the same.
Nothing here knows what a table holds or where a server runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import ClassVar

from thinwire.errors import ConfigError
from thinwire.policies.assignment import Assignment, Partition, Sized, check_placeable
from thinwire.policies.naming import Family, check_count
from thinwire.quantities import counted

_ALIGN = 40
"""Values: whole groups of five, and whole cache lines of packed bytes."""
_HEAVY = 1.5
"""Times the mean load of a server: what weighs less is worth no further frames."""
_NEARLY = 1 + 1e-9
"""Sums of the same loads in another order are equal but for this factor."""


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
        return _whole(tables, servers, [table % servers for table in range(len(tables))])


@dataclass(frozen=True, kw_only=True)
class Greedy(Placement):
    """Each table, in the model's order, on the least loaded server (TensorFlow's other strategy; Wu 2018, §2.3.1)."""

    id: ClassVar[str] = "greedy"

    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        check_placeable(tables, servers)
        return _whole(tables, servers, _least_loaded(tables, range(len(tables)), servers))


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
        check_placeable(tables, servers)
        return _whole(tables, servers, _least_loaded(tables, _largest_first(tables), servers))


@dataclass(frozen=True, kw_only=True)
class Uniform(Placement):
    """Every table split evenly over all servers (Wu 2018, ch. 5).

    Args:
        min_numel: the fewest values a partition may hold, `min` for short. 0 is Wu's own split: no bound, and
            a table with fewer values than servers leaves some servers without a part. Otherwise a table gets as
            many parts as there is room for, and the smaller tables go, largest first, to the least loaded servers.
            A bound spares partitions that are smaller than the headers they travel with.

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
        check_placeable(tables, servers)
        partitions: list[tuple[Partition, ...]] = [()] * len(tables)
        loads = [0.0] * servers

        def split(index: int, among: Sequence[int]) -> None:
            table = tables[index]
            cuts = [table.numel * part // len(among) for part in range(len(among) + 1)]
            ranges = zip(among, cuts[:-1], cuts[1:], strict=True)
            partitions[index] = tuple(Partition(*part) for part in ranges if part[1] < part[2])
            for part in partitions[index]:
                loads[part.server] += table.share(part)

        small = []
        for index in range(len(tables)):
            if self._parts(tables[index], servers) == servers:
                split(index, range(servers))
            else:
                small.append(index)
        for index in _largest_first(tables, small):
            lightest = sorted(range(servers), key=loads.__getitem__)[: self._parts(tables[index], servers)]
            split(index, sorted(lightest))
        return Assignment(servers, tuple(tables), tuple(partitions))

    def _parts(self, table: Sized, servers: int) -> int:
        return min(servers, max(1, table.numel // self.min_numel)) if self.min_numel else servers


@dataclass(frozen=True, kw_only=True)
class Sharded(Placement):
    """Large tables cut evenly over all servers, small ones whole on the least loaded: how ranks own a model.

    It depends on names, sizes and the order of the tables alone. Servers hold a part of every large table, so that
    every bucket of a collective exchange keeps every link busy; each part of a small one would cost a frame's header.
    A table between the two that weighs over 1.5 times a server's mean load is cut into as few parts as weigh no more
    than that load, on the least loaded: whole, it would keep one link busy while the others wait. Where there are such
    tables, the small ones are dealt out as `heuristic` does it, else in the model's order.

    Args:
        min_numel: of values, that every part of a table has at least, `min` for short. A part of fewer values than the
            default would spend a fifth of its bytes on its frame's header.
        align: parts begin at multiples of so many values: whole groups of five, and whole cache lines of packed bytes.

    Example:
        >>> placed = Sharded().place([Sized("big", 20_000, 20_000), Sized("bias", 10, 320)], 2)
        >>> [[(part.server, part.start, part.stop) for part in parts] for parts in placed.partitions]
        [[(0, 0, 10000), (1, 10000, 20000)], [(0, 0, 10)]]
        >>> placed = Sharded().place([Sized("large", 20_000, 20_000), Sized("bias", 10, 320)], 8)
        >>> [[part.numel for part in parts] for parts in placed.partitions]
        [[5000, 5000, 5000, 5000], [10]]
    """

    id: ClassVar[str] = "sharded"
    min_numel: int = 4096
    align: int = _ALIGN

    def __post_init__(self) -> None:
        check_count(f"{self.id}: min_numel", self.min_numel, 1)
        check_count(f"{self.id}: align", self.align, 1)

    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        check_placeable(tables, servers)
        mean = sum(table.nbytes for table in tables) / servers
        loads = [0.0] * servers
        partitions: list[tuple[Partition, ...]] = [()] * len(tables)
        counts = [self._parts(table, servers, mean) for table in tables]
        for index, table in enumerate(tables):
            if counts[index] == servers:  # as much on every server, or nearly so: it is no load to compare
                partitions[index] = _cut(table.numel, range(servers), self.align)
        rest = [index for index, parts in enumerate(counts) if parts < servers]
        if any(counts[index] > 1 for index in rest):
            rest = _largest_first(tables, rest)
        for index in rest:
            lightest = sorted(range(servers), key=loads.__getitem__)[: counts[index]]
            partitions[index] = _cut(tables[index].numel, sorted(lightest), self.align)
            for part in partitions[index]:
                loads[part.server] += tables[index].share(part)
        return Assignment(servers, tuple(tables), tuple(partitions))

    def _parts(self, table: Sized, servers: int, mean: float) -> int:
        room = table.numel // self.min_numel
        if room >= servers:
            return servers
        return min(room, math.ceil(table.nbytes / mean)) if room > 1 and table.nbytes > _HEAVY * mean else 1


@dataclass(frozen=True, kw_only=True)
class Balanced(Placement):
    """As `heuristic`, with as many of the largest tables cut evenly over all servers as an even load takes.

    A table in one piece keeps one link busy while the others wait for it: a model of one large layer would travel
    through the link of its owner alone. Tables are cut one after another, largest first, until no server carries more
    than it should, and no further, as each piece has a frame of its own.

    Args:
        excess: that the fullest server may carry, over the mean.

    Example:
        >>> placed = Balanced().place([Sized("big", 20_000, 20_000), Sized("a", 900, 900), Sized("b", 800, 800)], 2)
        >>> placed.partitions[0], placed.loads()
        ((Partition(server=0, start=0, stop=10000), Partition(server=1, start=10000, stop=20000)), (10900.0, 10800.0))
    """

    id: ClassVar[str] = "balanced"
    excess: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.excess < math.inf:
            raise ConfigError(f"{self.id}: excess is {self.excess}; it must be 0 or more, as in 0.1")

    def place(self, tables: Sequence[Sized], servers: int) -> Assignment:
        check_placeable(tables, servers)
        order = _largest_first(tables)
        most = (1 + self.excess) * sum(table.nbytes for table in tables) / servers
        pieces = [0.0] * servers  # what the tables that are cut put on each server
        for cut, index in enumerate(order):
            # A table that has no room for an aligned piece on every server is as whole as it can be.
            if tables[index].numel < _ALIGN * servers:
                return self._place(tables, servers, order, cut)
            # Most numbers of cuts leave one server with far too much, and that is soon seen.
            whole = [tables[each].nbytes for each in order[cut:] if tables[each].numel]
            if _fullest(pieces, whole, most) <= _NEARLY * most:
                placed = self._place(tables, servers, order, cut)
                if max(placed.loads()) <= most:
                    return placed
            for part in _cut(tables[index].numel, range(servers), _ALIGN):
                pieces[part.server] += tables[index].share(part)
        return self._place(tables, servers, order, len(tables))

    @staticmethod
    def _place(tables: Sequence[Sized], servers: int, order: Sequence[int], cut: int) -> Assignment:
        """Cuts the first so many tables of an order, and deals out the others in it."""
        loads, partitions = [0.0] * servers, [tuple[Partition, ...]()] * len(tables)
        for index in order[:cut]:
            partitions[index] = _cut(tables[index].numel, range(servers), _ALIGN)
            for part in partitions[index]:
                loads[part.server] += tables[index].share(part)
        for index in order[cut:]:
            if tables[index].numel:
                server = loads.index(min(loads))
                loads[server] += tables[index].nbytes
                partitions[index] = (Partition(server, 0, tables[index].numel),)
        return Assignment(servers, tuple(tables), tuple(partitions))


@dataclass(frozen=True, kw_only=True)
class Rows(Placement):
    """Tables cut into rows of one size, counted through the model: row i on server i mod N (GeePS; Wu 2018, §2.3.1).

    GeePS is "Scalable deep learning on distributed GPUs with a GPU-specialized parameter server" (Cui et al., 2016).
    Each server holds as many rows of every table as there, but rows that lie together, in one part: each part has a
    frame of its own.

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


POLICIES: Family[Placement] = Family(
    "placement",
    # The first is the default.
    {kind.id: kind for kind in (Heuristic, RoundRobin, Greedy, Uniform, Sharded, Balanced, Rows)},
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

    A table without values is on the first server.

    Args:
        placing: the policy, which the error names.
        placed: what it decided for a model's parameters.
    """
    holding = {part.server for parts in placed.partitions for part in parts or (Partition(0, 0, 0),)}
    if idle := placed.servers - len(holding):
        raise ConfigError(
            f"{idle} of {placed.servers} servers would hold no parameters, as {placing.id!r} places this model; take "
            f"{counted(len(holding), 'server')} (with group=…, ranks), or a placement that divides tensors, such as "
            "'uniform[min=1]'"
        )


def _cut(numel: int, among: Sequence[int], align: int) -> tuple[Partition, ...]:
    """A table cut evenly over some servers, at multiples of `align` values; it may be too small for the last ones."""
    size = -(-numel // (len(among) * align)) * align
    edges = [min(piece * size, numel) for piece in range(len(among) + 1)]
    ranges = zip(among, edges[:-1], edges[1:], strict=True)
    return tuple(Partition(*part) for part in ranges if part[1] < part[2])


def _fullest(loads: Sequence[float], weights: Iterable[float], most: float) -> float:
    """The fullest server's load once tables are dealt out in order; or one above `_NEARLY * most`, as soon as it is."""
    heap = list(loads)
    heapify(heap)
    fullest = max(heap)
    for weight in weights:
        fullest = max(fullest, heap[0] + weight)
        if fullest > _NEARLY * most:
            break
        heapreplace(heap, heap[0] + weight)
    return fullest


def _whole(tables: Sequence[Sized], servers: int, on: Sequence[int]) -> Assignment:
    """Tables in one piece: table i on server `on[i]`."""
    parts = [((Partition(on[i], 0, table.numel),) if table.numel else ()) for i, table in enumerate(tables)]
    return Assignment(servers, tuple(tables), tuple(parts))


def _least_loaded(tables: Sequence[Sized], order: Iterable[int], servers: int) -> list[int]:
    """The server of each table, where they are dealt out in `order`; equal loads go to the lower number."""
    loads, on = [0.0] * servers, [0] * len(tables)
    for index in order:
        on[index] = loads.index(min(loads))
        loads[on[index]] += tables[index].nbytes
    return on


def _largest_first(tables: Sequence[Sized], which: Iterable[int] | None = None) -> list[int]:
    """Table numbers by falling weight; equal weights by rising number."""
    return sorted(range(len(tables)) if which is None else which, key=lambda index: (-tables[index].nbytes, index))
