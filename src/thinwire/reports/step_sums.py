"""What is kept of a training's step records: sums by step and rank, and by tensor, and thinned curves."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from thinwire.telemetry import StepRecord

_MOST_POINTS = 1000
_RANK_POINTS = 128, 32
"""Of one table and rank, and of these the first, among which the warm-up ends."""


V = TypeVar("V")


class Thinned(Generic[V]):
    """A curve of any length kept in at most a thousand points: every second one goes when there are more.

    Args:
        most: points.
        whole: of the first so many none goes.

    >>> curve = Thinned[float]()
    >>> for step in range(5000): curve.add(step, 2.0 * step)
    >>> len(curve.points) <= 1000, curve.points[1]
    (True, (8, 16.0))
    """

    def __init__(self, most: int = _MOST_POINTS, whole: int = 0) -> None:
        self.points: list[tuple[int, V]] = []
        self._most, self._whole = most, whole
        self._every, self._count = 1, 0

    def add(self, step: int, value: V) -> None:
        """Takes the next point."""
        if self._count % self._every == 0:
            self.points.append((step, value))
            if len(self.points) > self._most:
                self.points[self._whole :], self._every = self.points[self._whole :: 2], 2 * self._every
        self._count += 1


@dataclass(slots=True)
class RankStep:
    """What one rank's step cost: sums over its tables."""

    time_s: float = 0.0
    push_nbytes: int = 0
    pull_nbytes: int = 0
    plain_nbytes: int = 0
    plain_way_nbytes: int = 0
    shared: bool = False
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    lag: float | None = None
    loss: float | None = None
    loss_finite: bool = True
    accuracy: float | None = None
    link_bps: float | None = None
    recorded: bool = False

    def add(self, record: StepRecord) -> None:
        """Adds one record of this rank and step."""
        self.time_s = max(self.time_s, record.time_s)
        self.push_nbytes += record.payload_bytes_push
        self.pull_nbytes += record.payload_bytes_pull
        self.plain_nbytes += record.ways * record.plain_way_nbytes
        self.plain_way_nbytes += record.plain_way_nbytes
        self.shared = self.shared or record.share < 1
        self.encode_s += record.encode_s
        self.decode_s += record.decode_s
        self.wait_s += record.wait_s
        self.lag = _larger(self.lag, record.residual_lag)
        self.loss = self.loss if record.loss is None else record.loss
        if not record.loss_finite or (record.loss is not None and not math.isfinite(record.loss)):
            self.loss, self.loss_finite = None, False
        self.accuracy = self.accuracy if record.accuracy is None else record.accuracy
        self.link_bps = self.link_bps if record.link_bps is None else record.link_bps
        self.recorded = self.recorded or bool(record.table)


@dataclass(frozen=True, slots=True)
class TableSum:
    """What a number of records of one table come to."""

    records: int = 0
    push_nbytes: int = 0
    pull_nbytes: int = 0
    plain_nbytes: int = 0

    @classmethod
    def of(cls, record: StepRecord) -> TableSum:
        """Returns what one record comes to."""
        plain = record.ways * record.plain_way_nbytes
        return cls(1, record.payload_bytes_push, record.payload_bytes_pull, plain)

    def __add__(self, other: TableSum) -> TableSum:
        return TableSum(
            self.records + other.records,
            self.push_nbytes + other.push_nbytes,
            self.pull_nbytes + other.pull_nbytes,
            self.plain_nbytes + other.plain_nbytes,
        )

    def __sub__(self, other: TableSum) -> TableSum:
        return TableSum(
            self.records - other.records,
            self.push_nbytes - other.push_nbytes,
            self.pull_nbytes - other.pull_nbytes,
            self.plain_nbytes - other.plain_nbytes,
        )


@dataclass(slots=True)
class _RankSums:
    """One table's records of one rank, which come in the order of its steps; those of several ranks do not."""

    codec: str = ""
    whole: TableSum = field(default_factory=TableSum)
    changed: TableSum = field(default_factory=TableSum)
    """Of all records until the codec was what it is now."""
    before: Thinned[TableSum] = field(default_factory=lambda: Thinned(*_RANK_POINTS))
    """Of all records until that of a step."""

    def add(self, record: StepRecord) -> None:
        if record.codec != self.codec:
            self.codec, self.changed = record.codec, self.whole
        self.before.add(record.step, self.whole)
        self.whole += TableSum.of(record)

    def since(self, step: int) -> TableSum:
        """Returns the sum of the records from a step on, as far as they are of the newest codec."""
        first = next((before for at, before in self.before.points if at >= step), self.whole)
        return self.whole - max(first, self.changed, key=lambda each: each.records)

    def keep(self, first: int, last: int | None = None) -> None:
        """Forgets where sums of other steps than these began."""
        points = self.before.points
        if last is None and (not points or first <= points[0][0]):
            return
        kept = [each for each in points if first <= each[0] and (last is None or each[0] < last)]
        if len(kept) < len(points):
            self.before = Thinned(*_RANK_POINTS)
            for at, value in kept:
                self.before.add(at, value)

    def go_back(self, step: int) -> None:
        """Takes out what came of a step and those after it: it comes again."""
        self.whole = next((before for at, before in self.before.points if at >= step), self.whole)
        self.changed = min(self.changed, self.whole, key=lambda each: each.records)
        self.keep(0, step)


@dataclass(slots=True)
class TableSums:
    """One table's records, of all ranks and steps."""

    codec: str = ""
    numel: int = 0
    lags: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    curve: Thinned[float] = field(default_factory=Thinned)
    ranks: defaultdict[int, _RankSums] = field(default_factory=lambda: defaultdict(_RankSums))

    def add(self, record: StepRecord) -> None:
        """Takes one record."""
        self.codec, self.numel = record.codec, record.numel
        self.ranks[record.rank].add(record)
        if record.residual_lag is not None:
            self.lags[record.rank] = record.residual_lag
            if record.rank == min(self.lags):
                self.curve.add(record.step, record.residual_lag)
        if record.residual_norm is not None:
            self.norms[record.rank] = record.residual_norm

    def since(self, step: int) -> TableSum:
        """Returns the sum of the records from a step on, as far as they are of the newest codec; of all of that codec
        where there is none."""
        now = [each for each in self.ranks.values() if each.codec == self.codec]
        found = sum((each.since(step) for each in now), TableSum())
        return found if found.records else sum((each.whole - each.changed for each in now), TableSum())

    def keep(self, step: int) -> None:
        """Forgets what came of earlier steps, but for what is now."""
        for each in self.ranks.values():
            each.keep(step)

    def go_back(self, rank: int, step: int) -> None:
        """Takes out what came of a rank's step and those after it: it comes again."""
        self.ranks[rank].go_back(step)


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)
