"""What a message between ranks costs, measured among real processes."""

from __future__ import annotations

from thinwire.bench.peer_costs import measure_peer_costs


def test_a_message_takes_some_microseconds_of_a_processor() -> None:
    costs = measure_peer_costs(ranks=2)
    assert 1e-6 < costs.message_s < 0.05
    assert costs.hop_s == 0.0, "two ranks' ring has two hops"


def test_a_ring_of_three_waits_at_its_hops() -> None:
    assert 0.0 <= measure_peer_costs(ranks=3).hop_s < 0.05
