"""What is said of the modelled clock is what it computes with."""

from __future__ import annotations

from thinwire.planner.transport_costs import TransportCosts
from thinwire_lab.studies.reproduce.timings import MESSAGES


def test_what_messages_cost_is_said_as_the_clock_has_it() -> None:
    costs = TransportCosts()
    worker, server, way = (1e6 * each for each in (costs.worker_message_s, costs.server_message_s, costs.latency_s))
    assert f"{worker:g} µs of a processor at a worker, {server:g} µs at a server" in MESSAGES
    assert f"{1e9 * costs.byte_s:g} ns a byte at either, and {way:g} µs on the way" in MESSAGES
