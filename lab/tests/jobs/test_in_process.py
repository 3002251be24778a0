"""A run with a computed clock: the bits of other runs, and the time of its links."""

import pytest

from thinwire.errors import ConfigError
from thinwire.planner.transport_costs import TCP_PAYLOAD_NBYTES
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.virtual_time import Agenda, ModelledLinks


def job(**changes: object) -> Job:
    given: dict[str, object] = {"design": "fp32", "workers": 3, "steps": 4, **changes}
    return Job(**given)  # type: ignore[arg-type]  # of a test's own making


def test_modelled_run_has_the_weights_and_bytes_of_other_runs() -> None:
    others = ({"design": "terngrad"}, {"design": "3lc[s=1.75]", "servers": 2}, {"servers_on_workers": True})
    for changes in (*others, {"dropout": 0.25}):
        ours, plain = in_process.run(job(link="100mbit", **changes)), in_process.run(job(**changes))
        assert (ours.weights, ours.test_accuracy) == (plain.weights, plain.test_accuracy), changes
        assert (ours.wire_bytes_push, ours.wire_bytes_pull) == (plain.wire_bytes_push, plain.wire_bytes_pull), changes
        assert (ours.shaping, ours.link, ours.in_process) == ("modelled", "100mbit", True)


def test_modelled_link_decides_the_seconds_of_a_step() -> None:
    outcome = in_process.run(job(link="1mbit"))
    pushes = 8 * outcome.wire_bytes_push / 4 / 1e6  # seconds in which a step's gradients cross the server's link
    # Updates come back while later gradients leave, or after them; computing is a matter of milliseconds.
    assert 1.04 * pushes < outcome.seconds_per_step < 2.2 * pushes
    shared = in_process.run(job(link="1mbit", servers_on_workers=True))
    assert shared.seconds_per_step < 0.75 * outcome.seconds_per_step  # each link has a third of the traffic


def test_modelled_run_impossible_options_raise_config_error() -> None:
    with pytest.raises(ConfigError, match="budget"):
        in_process.run(job(steps=None, seconds=3.0))
    gpu = job(link="1mbit")
    object.__setattr__(gpu, "device", "cuda")
    with pytest.raises(ConfigError, match="cuda"):
        in_process.run(gpu)


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


def test_modelled_messages_queue_on_shared_links_alone() -> None:
    cases = {
        "one": ([("a", "s", 0.5)], [1.5]),
        "one sender's follow each other": ([("a", "s", 0.0), ("a", "t", 0.0)], [1.0, 2.0]),
        "many senders queue at one receiver": ([("a", "s", 0.0), ("b", "s", 0.0), ("c", "s", 0.25)], [1.0, 2.0, 3.0]),
        "both ways at once": ([("a", "s", 0.0), ("s", "a", 0.0)], [1.0, 1.0]),
        "no link within a node": ([("a", "a", 0.0), ("a", "s", 0.0)], [0.0, 1.0]),
    }
    for case, (messages, expected) in cases.items():
        assert arrivals(messages) == pytest.approx(expected), case
    assert arrivals([("a", "s", 0.0)], rate=None, latency_s=0.25) == [0.25]


def test_modelled_burst_passes_at_once_after_a_pause() -> None:
    half = SECOND * 1514 / TCP_PAYLOAD_NBYTES / 2
    cases = {
        "one sender's follow each other": ([("a", "s", 0.0), ("a", "t", 0.0)], [0.5, 1.5]),
        "after a pause": ([("a", "s", 0.0), ("a", "s", 5.0)], [0.5, 5.5]),
        "many senders queue at one receiver": ([("a", "s", 0.0), ("b", "s", 0.0)], [0.5, 1.5]),
    }
    for case, (messages, expected) in cases.items():
        assert arrivals(messages, burst_bytes=half) == pytest.approx(expected), case
