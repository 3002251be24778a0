"""What tables at a worker cost: bytes and seconds, of each for the step under way, and of all for the counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.telemetry import Counters


@dataclass(slots=True)
class StepCost:
    """The costs of one table in one step; the fields are those of `telemetry.StepRecord`."""

    payload_bytes_push: int = 0
    payload_bytes_pull: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0


class Costs(Protocol):
    """A table, as it is counted."""

    cost: StepCost
    counters: Counters
    size: int


def count_pushes(tables: Sequence[Costs], payload_nbytes: Sequence[int], seconds: float) -> None:
    """Counts the pushes of some tables of one worker, which took so many seconds together."""
    counters, share = tables[0].counters, seconds / len(tables)
    for table, nbytes in zip(tables, payload_nbytes, strict=True):
        table.cost.payload_bytes_push += nbytes
        table.cost.encode_s += share
    counters.add("payload_bytes_push", sum(payload_nbytes))
    counters.add("values_push", sum([table.size for table in tables]))
    counters.add("encode_seconds", seconds)


def count_pulls(tables: Sequence[Costs], payload_nbytes: Sequence[int], seconds: float) -> None:
    """Counts updates of some tables of one worker, which took so many seconds together."""
    counters, share = tables[0].counters, seconds / len(tables)
    for table, nbytes in zip(tables, payload_nbytes, strict=True):
        table.cost.payload_bytes_pull += nbytes
        table.cost.decode_s += share
    counters.add("payload_bytes_pull", sum(payload_nbytes))
    counters.add("values_pull", sum([table.size for table in tables]))
    counters.add("decode_seconds", seconds)
