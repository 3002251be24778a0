"""What a message between ranks costs, measured among real processes."""

from __future__ import annotations

import pytest

from thinwire_lab.bench.peer_costs import measure_peer_costs, measured


def test_a_message_takes_some_microseconds_of_a_processor() -> None:
    costs = measure_peer_costs(ranks=2)
    assert 1e-6 < costs.message_s < 0.05
    assert costs.hop_s == 0.0, "two ranks' ring has two hops"
    assert 1e-11 < costs.byte_s < 1e-7


def test_a_ring_of_three_waits_at_its_hops() -> None:
    """How long is the machine's; that it is not negative where noise is larger, and no mistake of units, is ours."""
    assert 0.0 <= measure_peer_costs(ranks=3).hop_s < 0.05
    assert measured([0.002, 0.002, 0.001], [0.005, 0.006, 0.002], 3, 2)[1] == 0.0
    assert measured([0.002, 0.002, 0.001], [0.006, 0.005, 0.002], 3, 2)[1] == pytest.approx(0.0005)
