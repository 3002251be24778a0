"""Computed time: the events and links of a modelled cluster.

A link carries one message at a time, in order of arrival. A message flows through its sender's link and its receiver's
at once: a single message takes as long as the slower link needs, and messages of many senders queue at one receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush

from thinwire.planner.transport_costs import TCP_HEADERS_NBYTES, TCP_PAYLOAD_NBYTES
from thinwire.runtime.clock import Cancel
from thinwire.transports.links import TokenBucket


class Agenda:
    """Future events by time; events of one time happen in the order of their notes.

    It is also a server's clock (`runtime.clock.Clock`).
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._waiting: list[tuple[float, int, Callable[[float], None]]] = []
        self._noted = 0

    def note(self, when: float, happen: Callable[[float], None]) -> None:
        """Notes an event: `advance` calls `happen` with the time, in seconds."""
        heappush(self._waiting, (when, self._noted, happen))
        self._noted += 1

    @property
    def next_s(self) -> float:
        """The time of the next event; infinity if there is none."""
        return self._waiting[0][0] if self._waiting else float("inf")

    def advance(self) -> None:
        """Runs the next event."""
        self._now_s, _, happen = heappop(self._waiting)
        happen(self._now_s)

    def now(self) -> float:
        """Returns the time of the current event, in seconds."""
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancel:
        """Calls `callback` once, `delay_s` seconds from now; returns a function that cancels the call."""
        calls = [callback]

        def happen(now_s: float) -> None:
            for call in calls:
                call()

        self.note(self._now_s + delay_s, happen)
        return calls.clear


class ModelledLinks:
    """Every process's link to one switch, with one rate both ways.

    Each way is a token bucket like the kernel's queue in `engines.namespaces`: after a pause a burst passes at once.
    """

    def __init__(self, agenda: Agenda, bps: int | None, *, latency_s: float = 0.0, burst_bytes: float = 0.0) -> None:
        self._agenda, self._bps, self._latency_s, self._burst_bytes = agenda, bps, latency_s, burst_bytes
        self._out: dict[Hashable, TokenBucket] = {}
        self._in: dict[Hashable, TokenBucket] = {}
        self._sent: dict[Hashable, float] = {}

    def send(
        self, sender: Hashable, receiver: Hashable, nbytes: int, ready_s: float, arrived: Callable[[float], None]
    ) -> None:
        """Sends a message once its sender's link is free."""
        if sender == receiver or self._bps is None:
            self._agenda.note(ready_s + self._latency_s, arrived)
            return
        crossing = nbytes + TCP_HEADERS_NBYTES * -(-nbytes // TCP_PAYLOAD_NBYTES)
        begins_s = max(ready_s, self._sent.get(sender, ready_s))
        sent_s = self._sent[sender] = ready_s + self._bucket(self._out, sender).delay(crossing, ready_s)

        def flow(now_s: float) -> None:
            received_s = now_s + self._bucket(self._in, receiver).delay(crossing, now_s)
            self._agenda.note(max(sent_s, received_s) + self._latency_s, arrived)

        self._agenda.note(begins_s, flow)

    def _bucket(self, of: dict[Hashable, TokenBucket], name: Hashable) -> TokenBucket:
        assert self._bps is not None
        return of.setdefault(name, TokenBucket(self._bps, self._burst_bytes))
