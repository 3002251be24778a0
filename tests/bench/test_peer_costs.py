"""What a message between ranks costs, measured among real processes."""

from __future__ import annotations

from thinwire.bench.peer_costs import measure_peer_message_s


def test_a_message_takes_some_microseconds_of_a_processor() -> None:
    assert 1e-6 < measure_peer_message_s(ranks=2) < 0.05
