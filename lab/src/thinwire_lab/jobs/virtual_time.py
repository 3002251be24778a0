"""Time that is computed: links and what happens when, for a cluster that one process stands in for.

What comes to a link is served in order, one thing at a time. A message flows through its sender's link
and its receiver's at once, so that alone it takes as long as the slower of them needs, and those of many senders queue
at their one receiver. Nothing here measures anything or knows what a message is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush

from thinwire.planner.transport_costs import TCP_HEADERS_NBYTES, TCP_PAYLOAD_NBYTES
from thinwire.runtime.clock import Cancel
from thinwire.transports.links import TokenBucket


class Agenda:
    """What is to happen, by time; what is of one time happens in the order in which it was noted.

    It is a server's clock, too (`runtime.clock.Clock`).
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._waiting: list[tuple[float, int, Callable[[float], None]]] = []
        self._noted = 0

    def note(self, when: float, happen: Callable[[float], None]) -> None:
        """Has `happen` called with the time, in seconds, when its time has come."""
        heappush(self._waiting, (when, self._noted, happen))
        self._noted += 1

    @property
    def next_s(self) -> float:
        """When the next thing happens; infinity where nothing is noted."""
        return self._waiting[0][0] if self._waiting else float("inf")

    def advance(self) -> None:
        """Has the next thing happen."""
        self._now_s, _, happen = heappop(self._waiting)
        happen(self._now_s)

    def now(self) -> float:
        """Returns the time of what happens now, in seconds."""
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancel:
        """Calls `callback` once, `delay_s` seconds from now; returns what cancels that."""
        calls = [callback]

        def happen(now_s: float) -> None:
            for call in calls:
                call()

        self.note(self._now_s + delay_s, happen)
        return calls.clear


class ModelledLinks:
    """Every process's link to one switch, of one rate, the same both ways.

    Each way is a token bucket like the kernel's queue in `engines.namespaces`: after a pause a burst passes at once.
    A message flows through its sender's bucket and its receiver's at the same time.
    """

    def __init__(self, agenda: Agenda, bps: int | None, *, latency_s: float = 0.0, burst_bytes: float = 0.0) -> None:
        self._agenda, self._bps, self._latency_s, self._burst_bytes = agenda, bps, latency_s, burst_bytes
        self._out: dict[Hashable, TokenBucket] = {}
        self._in: dict[Hashable, TokenBucket] = {}
        self._sent: dict[Hashable, float] = {}

    def send(
        self, sender: Hashable, receiver: Hashable, nbytes: int, ready_s: float, arrived: Callable[[float], None]
    ) -> None:
        """Sends a message as soon as its sender's link is free."""
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
