"""Which server, or which rank, holds which values: placement policies, decided once, before training.

A policy sees every table's size and weight and returns an `Assignment`: for each table the partitions that cover it,
each on one server. The weight is the caller's: bytes, or bytes as they are predicted to travel. The decision depends
on its arguments alone and ties are broken by number, so that every process that decides for itself decides the same.
"""

from __future__ import annotations

import math
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
_HEAVY = 1.5
"""Times the mean load of a server: what weighs less is worth no further frames."""


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
        parts = [_cut(table.numel, [index % servers], 1) for index, table in enumerate(tables)]
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
        return _deal(tables, servers, _largest_first(tables), [1] * len(tables))


@dataclass(frozen=True, kw_only=True)
class Uniform(Placement):
    """Every table split evenly over all servers (Wu 2018, ch. 5).

    Args:
        min_numel: the fewest values of a partition, `min` for short; it spares partitions that are smaller than their
            headers. 0 is Wu's own split, without a bound. Otherwise a table gets as many parts as there is room for,
            and the smaller tables go, largest first, to the least loaded servers.

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
        rooms = [table.numel // self.min_numel if self.min_numel else servers for table in tables]
        counts = [min(servers, max(1, room)) for room in rooms]
        cut = [index for index, count in enumerate(counts) if count == servers]
        small = [index for index, count in enumerate(counts) if count < servers]
        return _deal(tables, servers, [*cut, *_largest_first(tables, small)], counts)


@dataclass(frozen=True, kw_only=True)
class Sharded(Placement):
    """Large tables cut evenly over all servers, small ones whole on the least loaded: how ranks own a model.

    Servers hold a part of every large table, so that every bucket of a collective exchange keeps every link busy; each
    part of a small one would cost a frame's header. A table between the two that weighs over 1.5 times a server's mean
    load is cut into as few parts as weigh no more than that load: whole, it would keep one link busy while the others
    wait. Where there are such tables, all small ones are dealt out largest first, else in the model's order.

    Args:
        min_numel: the fewest values of a part, `min` for short. A part of fewer values than the default would spend a
            fifth of its bytes on its frame's header.
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
        counts = [self._parts(table, servers, mean) for table in tables]
        cut = [index for index, count in enumerate(counts) if count == servers]
        rest = [index for index, count in enumerate(counts) if count < servers]
        if any(counts[index] > 1 for index in rest):
            rest = _largest_first(tables, rest)
        return _deal(tables, servers, [*cut, *rest], counts, self.align, weigh_cut=False)

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
        order, counts = _largest_first(tables), [1] * len(tables)
        most = (1 + self.excess) * sum(table.nbytes for table in tables) / servers
        for index in order:
            if tables[index].numel < _ALIGN * servers:
                break  # no room for an aligned piece on every server: it stays whole, and so do all that follow
            if tables[index].nbytes <= most:
                placed = _deal(tables, servers, order, counts, _ALIGN)
                if max(placed.loads()) <= most:
                    return placed
            counts[index] = servers
        return _deal(tables, servers, order, counts, _ALIGN)


@dataclass(frozen=True, kw_only=True)
class Rows(Placement):
    """Tables cut into rows of one size, counted through the model: row i on server i mod N (GeePS; Wu 2018, §2.3.1).

    GeePS is "Scalable deep learning on distributed GPUs with a GPU-specialized parameter server" (Cui et al., 2016).
    Each server holds as many rows of every table as there, but rows that lie together: each part has a frame of its
    own.

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

    Args:
        placing: the policy, which the error names.
        placed: what it decided for a model's parameters; a table without values counts for the first server.
    """
    holding = {part.server for parts in placed.partitions for part in parts or (Partition(0, 0, 0),)}
    if idle := placed.servers - len(holding):
        raise ConfigError(
            f"{idle} of {placed.servers} servers would hold no parameters, as {placing.id!r} places this model; take "
            f"{counted(len(holding), 'server')} (with group=…, ranks), or a placement that divides tensors, such as "
            "'uniform[min=1]'"
        )


def _deal(
    tables: Sequence[Sized],
    servers: int,
    order: Iterable[int],
    counts: Sequence[int],
    align: int | None = None,
    *,
    weigh_cut: bool = True,
) -> Assignment:
    """Deals tables out in `order`, table i as `counts[i]` even parts on the least loaded servers.

    Equal loads go to the lower number. A table on all servers is a load of about the same weight on each; where
    `weigh_cut` is False, it counts as none.
    """
    check_placeable(tables, servers)
    loads, partitions = [0.0] * servers, [tuple[Partition, ...]()] * len(tables)
    for index in order:
        lightest = sorted(range(servers), key=loads.__getitem__)[: counts[index]]
        partitions[index] = _cut(tables[index].numel, sorted(lightest), align)
        if weigh_cut or len(lightest) < servers:
            for part in partitions[index]:
                loads[part.server] += tables[index].share(part)
    return Assignment(servers, tuple(tables), tuple(partitions))


def _cut(numel: int, among: Sequence[int], align: int | None) -> tuple[Partition, ...]:
    """A table cut evenly over some servers, at multiples of `align` values; it may be too small for the last ones."""
    pieces = range(len(among) + 1)
    if align is None:
        edges = [numel * piece // len(among) for piece in pieces]
    else:
        size = -(-numel // (len(among) * align)) * align
        edges = [min(piece * size, numel) for piece in pieces]
    ranges = zip(among, edges[:-1], edges[1:], strict=True)
    return tuple(Partition(*part) for part in ranges if part[1] < part[2])


def _largest_first(tables: Sequence[Sized], which: Iterable[int] | None = None) -> list[int]:
    """Table numbers by falling weight; equal weights by rising number."""
    return sorted(range(len(tables)) if which is None else which, key=lambda index: (-tables[index].nbytes, index))
