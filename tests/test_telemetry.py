"""Counters are plain sums."""

from __future__ import annotations

from thinwire.telemetry import Counters


def test_sums_by_name() -> None:
    counters = Counters()
    counters.add("wire_bytes_push", 10)
    counters.add("wire_bytes_push", 5)
    counters.add("seconds", 0.5)
    assert counters["wire_bytes_push"] == 15
    assert counters.snapshot() == {"wire_bytes_push": 15, "seconds": 0.5}


def test_whole_numbers_stay_whole() -> None:
    counters = Counters()
    counters.add("bytes", 2**60)
    counters.add("bytes", 1)
    assert counters["bytes"] == 2**60 + 1


def test_asking_creates_nothing() -> None:
    counters = Counters()
    assert counters["never"] == 0
    assert counters.snapshot() == {}


def test_a_snapshot_is_a_copy() -> None:
    counters = Counters()
    counters.add("bytes", 1)
    snapshot = counters.snapshot()
    counters.add("bytes", 1)
    assert snapshot == {"bytes": 1}
