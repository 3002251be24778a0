"""What is kept of a training's step records: sums by step and rank, and by tensor, and thinned curves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from thinwire.telemetry import StepRecord

_MOST_POINTS = 1000


V = TypeVar("V")


class Thinned(Generic[V]):
    """A curve of any length kept in at most a thousand points: every second one goes when there are more.

    >>> curve = Thinned[float]()
    >>> for step in range(5000): curve.add(step, 2.0 * step)
    >>> len(curve.points) <= 1000, curve.points[1]
    (True, (8, 16.0))
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, V]] = []
        self._every, self._count = 1, 0

    def add(self, step: int, value: V) -> None:
        """Takes the next point."""
        if self._count % self._every == 0:
            self.points.append((step, value))
            if len(self.points) > _MOST_POINTS:
                self.points, self._every = self.points[::2], 2 * self._every
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
    serving_ranks: int = 0
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
        self.serving_ranks = max(self.serving_ranks, record.serving_ranks)
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

    def __add__(self, record: StepRecord) -> TableSum:
        return TableSum(
            self.records + 1,
            self.push_nbytes + record.payload_bytes_push,
            self.pull_nbytes + record.payload_bytes_pull,
            self.plain_nbytes + record.ways * record.plain_way_nbytes,
        )

    def __sub__(self, other: TableSum) -> TableSum:
        return TableSum(
            self.records - other.records,
            self.push_nbytes - other.push_nbytes,
            self.pull_nbytes - other.pull_nbytes,
            self.plain_nbytes - other.plain_nbytes,
        )


@dataclass(slots=True)
class TableSums:
    """One table's records, of all ranks and steps."""

    codec: str = ""
    numel: int = 0
    lags: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    curve: Thinned[float] = field(default_factory=Thinned)
    whole: TableSum = field(default_factory=TableSum)
    changed: TableSum = field(default_factory=TableSum)
    """Of all records until the codec was what it is now."""
    before: Thinned[TableSum] = field(default_factory=Thinned)
    """Of all records until those of a step."""

    def add(self, record: StepRecord) -> None:
        """Takes one record."""
        if record.codec != self.codec:
            self.changed = self.whole
        self.codec, self.numel = record.codec, record.numel
        self.before.add(record.step, self.whole)
        self.whole += record
        if record.residual_lag is not None:
            self.lags[record.rank] = record.residual_lag
            if record.rank == min(self.lags):
                self.curve.add(record.step, record.residual_lag)
        if record.residual_norm is not None:
            self.norms[record.rank] = record.residual_norm

    def since(self, step: int) -> TableSum:
        """Returns the sum of the records from a step on, as far as they are of the newest codec; of all of that codec
        where there is none."""
        first = next((before for at, before in self.before.points if at >= step), self.changed)
        return self.whole - max(first, self.changed, key=lambda each: each.records)

    def keep(self, step: int) -> None:
        """Forgets what came of earlier steps, but for what is now."""
        if self.before.points and self.before.points[0][0] < step:
            kept = [each for each in self.before.points if each[0] >= step]
            self.before = Thinned()
            for at, value in kept:
                self.before.add(at, value)


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)
