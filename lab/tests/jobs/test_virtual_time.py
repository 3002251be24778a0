"""Links and processors of computed time, against what can be worked out by hand."""

import pytest

from thinwire.errors import ConfigError
from thinwire.planner.transport_costs import TCP_PAYLOAD_NBYTES
from thinwire_lab.jobs.virtual_time import Agenda, ModelledLinks, Processors

SECOND = 1000 * TCP_PAYLOAD_NBYTES
"""Bytes that take a second at `RATE`, with the headers of a thousand packets."""
RATE = 8 * 1000 * 1514


def arrivals(
    messages: list[tuple[str, str, float]],
    rate: int | None = RATE,
    latency_s: float = 0.0,
    burst_bytes: float = 0.0,
) -> list[float]:
    """Returns when each message of a second (sender, receiver, ready) has arrived."""
    agenda = Agenda()
    links = ModelledLinks(agenda, rate, latency_s=latency_s, burst_bytes=burst_bytes)
    arrived = [0.0] * len(messages)
    for number, (sender, receiver, ready_s) in enumerate(messages):
        links.send(sender, receiver, SECOND, ready_s, lambda now, number=number: arrived.__setitem__(number, now))  # type: ignore[misc]  # a lambda's default
    while agenda.next_s < float("inf"):
        agenda.advance()
    return arrived


def test_messages_queue_where_a_link_is_shared_and_nowhere_else() -> None:
    cases = {
        "one": ([("a", "s", 0.5)], [1.5]),
        "one sender's follow each other": ([("a", "s", 0.0), ("a", "t", 0.0)], [1.0, 2.0]),
        "many senders queue at one receiver": ([("a", "s", 0.0), ("b", "s", 0.0), ("c", "s", 0.25)], [1.0, 2.0, 3.0]),
        "both ways at once": ([("a", "s", 0.0), ("s", "a", 0.0)], [1.0, 1.0]),
        "others are not in the way": ([("a", "s", 0.0), ("b", "t", 0.0)], [1.0, 1.0]),
        "no link within a node": ([("a", "a", 0.0), ("a", "s", 0.0)], [0.0, 1.0]),
    }
    for case, (messages, expected) in cases.items():
        assert arrivals(messages) == pytest.approx(expected), case
    assert arrivals([("a", "s", 0.0)], rate=None, latency_s=0.25) == [0.25]


def test_a_burst_passes_at_once_after_a_pause() -> None:
    half = SECOND * 1514 / TCP_PAYLOAD_NBYTES / 2
    cases = {
        "one": ([("a", "s", 0.5)], [1.0]),
        "one sender's follow each other": ([("a", "s", 0.0), ("a", "t", 0.0)], [0.5, 1.5]),
        "after a pause": ([("a", "s", 0.0), ("a", "s", 5.0)], [0.5, 5.5]),
        "many senders queue at one receiver": ([("a", "s", 0.0), ("b", "s", 0.0)], [0.5, 1.5]),
    }
    for case, (messages, expected) in cases.items():
        assert arrivals(messages, burst_bytes=half) == pytest.approx(expected), case


def test_cores_are_taken_in_turn() -> None:
    own, shared = Processors(None), Processors(2)
    for processors, begins in ((own, [0.0, 0.0, 0.0, 0.0]), (shared, [0.0, 0.0, 3.0, 3.0])):
        seen = []
        for _ in range(4):
            seen.append(processors.begins(0.0))
            processors.book(seen[-1], 3.0)
        assert seen == begins
    assert shared.begins(7.0) == 7.0
    with pytest.raises(ConfigError, match="0 cores"):
        Processors(0)
