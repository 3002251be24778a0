"""Sums of a training's step records by step and rank, and bytes by tensor, rank and step."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from thinwire.telemetry import StepRecord


@dataclass(slots=True)
class RankStep:
    """Sums of one rank's step over its tables."""

    time_s: float = 0.0
    push_nbytes: int = 0
    pull_nbytes: int = 0
    plain_nbytes: int = 0
    plain_way_nbytes: int = 0
    shared: bool = False
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
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
        self.loss = self.loss if record.loss is None else record.loss
        if not record.loss_finite or (record.loss is not None and not math.isfinite(record.loss)):
            self.loss, self.loss_finite = None, False
        self.accuracy = self.accuracy if record.accuracy is None else record.accuracy
        self.link_bps = self.link_bps if record.link_bps is None else record.link_bps
        self.recorded = self.recorded or bool(record.table)


class _RankTable:
    """One table's records of one rank since its codec changed last, in the order of the steps."""

    def __init__(self) -> None:
        self.codec = ""
        self._columns = [array("q") for _ in range(4)]  # step; bytes pushed, pulled and of both uncompressed
        self._lags = array("d")  # NaN where no residual is kept

    def add(self, record: StepRecord) -> None:
        if record.codec != self.codec:
            self.codec = record.codec
            self.cut(slice(None))
        plain = record.ways * record.plain_way_nbytes
        row = record.step, record.payload_bytes_push, record.payload_bytes_pull, plain
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        self._lags.append(math.nan if record.residual_lag is None else record.residual_lag)

    def at(self, step: int) -> int:
        """Returns how many records are of earlier steps."""
        return bisect_left(self._columns[0], step)

    def cut(self, rows: slice) -> None:
        for column in self._columns:
            del column[rows]
        del self._lags[rows]

    def lags(self) -> list[tuple[int, float]]:
        """Returns the steps with a lag, and the lags."""
        return [(step, lag) for step, lag in zip(self._columns[0], self._lags, strict=True) if not math.isnan(lag)]

    def since(self, step: int) -> list[int]:
        """Returns the number of records from a step on, and the sums of their bytes."""
        first = self.at(step)
        return [len(self._columns[0]) - first, *(sum(column[first:]) for column in self._columns[1:])]


@dataclass(slots=True)
class TableSums:
    """One table's records, of all ranks and steps."""

    codec: str = ""
    numel: int = 0
    lags: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    ranks: defaultdict[int, _RankTable] = field(default_factory=lambda: defaultdict(_RankTable))

    def add(self, record: StepRecord) -> None:
        """Takes one record."""
        self.codec, self.numel = record.codec, record.numel
        self.ranks[record.rank].add(record)
        if record.residual_lag is not None:
            self.lags[record.rank] = record.residual_lag
        if record.residual_norm is not None:
            self.norms[record.rank] = record.residual_norm

    def lag_curve(self) -> list[tuple[int, float]]:
        """Returns the lags of the first rank that keeps a residual, with their steps, since the codec changed last."""
        return self.ranks[min(self.lags)].lags() if self.lags else []

    def since(self, step: int) -> tuple[int, int, int, int]:
        """Returns how many records of the newest codec are from a step on, and their bytes pushed, pulled and of both
        uncompressed; of all records of that codec where there is none."""
        now = [each for each in self.ranks.values() if each.codec == self.codec]
        records, push, pull, plain = (sum(column) for column in zip(*(each.since(step) for each in now), strict=True))
        return (records, push, pull, plain) if records or not step else self.since(0)

    def keep(self, step: int) -> None:
        """Forgets bytes of earlier steps."""
        for each in self.ranks.values():
            each.cut(slice(each.at(step)))

    def go_back(self, rank: int, step: int) -> None:
        """Forgets a rank's step and those after it: they come again."""
        self.ranks[rank].cut(slice(self.ranks[rank].at(step), None))
