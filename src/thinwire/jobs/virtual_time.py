"""Time that is computed: processors, links and what happens when, for a cluster that one process stands in for.

What comes to a link or a processor is served in order, one thing at a time. A message flows through its sender's link
and its receiver's at once, so that alone it takes as long as the slower of them needs, and those of many senders queue
at their one receiver. Nothing here measures anything or knows what a message is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heappop, heappush

from thinwire.errors import ConfigError
from thinwire.transports.shaped import BITS_PER_BYTE

TCP_PAYLOAD_NBYTES = 1448
TCP_HEADERS_NBYTES = 66
"""Of a packet on Ethernet with IPv4 and TCP timestamps: 1,514 bytes carry 1,448."""


@dataclass(frozen=True, kw_only=True)
class TransportCosts:
    """What a transport costs besides the bytes on the link; each is of one message at one of its two ends.

    Args:
        message_s: of a processor, in seconds.
        byte_s: of a processor, in seconds a byte.
        latency_s: from the last byte out to the message in the other program's hands, in seconds.
    """

    message_s: float = 120e-6
    byte_s: float = 0.5e-9
    latency_s: float = 200e-6


class Agenda:
    """What is to happen, by time; what is of one time happens in the order in which it was noted."""

    def __init__(self) -> None:
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
        when, _, happen = heappop(self._waiting)
        happen(when)


class Processors:
    """Processors that all processes share, each working off one thing at a time.

    Args:
        cores: how many; None: every process has its own and never waits for one.
    """

    def __init__(self, cores: int | None) -> None:
        if cores is not None and cores < 1:
            raise ConfigError(f"{cores} cores; at least 1 is needed, or None for one of its own for each process")
        self._free: list[float] | None = None if cores is None else [0.0] * cores

    def begins(self, ready_s: float) -> float:
        """Returns when something that is ready at a time finds a free processor."""
        return ready_s if self._free is None else max(ready_s, min(self._free))

    def book(self, begin_s: float, seconds: float) -> None:
        """Keeps the processor that is free first busy from `begin_s` for so many seconds."""
        if self._free is not None:
            self._free[self._free.index(min(self._free))] = begin_s + seconds


class Links:
    """Every process's link to one switch, of one rate, the same both ways.

    Args:
        agenda: where what comes later is noted.
        bps: bits a second, headers included; None is no limit.
        latency_s: added to every message.

    Example:
        Two senders of 1,448,000 bytes, and one receiver, at 12.112 Mbit/s: one message takes a second.

        >>> agenda, arrived = Agenda(), []
        >>> links = Links(agenda, 12_112_000, latency_s=0.0)
        >>> for sender in ("a", "b"):
        ...     links.send(sender, "c", 1_448_000, 0.0, arrived.append)
        >>> while agenda.next_s < float("inf"):
        ...     agenda.advance()
        >>> [round(seconds, 3) for seconds in arrived]
        [1.0, 2.0]
    """

    def __init__(self, agenda: Agenda, bps: int | None, *, latency_s: float) -> None:
        self._agenda, self._latency_s = agenda, latency_s
        self._bytes_per_s = float("inf") if bps is None else bps / BITS_PER_BYTE
        self._out: dict[Hashable, float] = {}
        self._in: dict[Hashable, float] = {}

    def send(
        self, sender: Hashable, receiver: Hashable, nbytes: int, ready_s: float, arrived: Callable[[float], None]
    ) -> None:
        """Sends a message as soon as its sender's link is free.

        Args:
            sender, receiver: whose links; one name for both crosses no link.
            nbytes: of the message above TCP.
            ready_s: when it is there to be sent, in seconds; never before an earlier call's of this sender.
            arrived: called when it has arrived, with the time in seconds.
        """
        if sender == receiver:
            self._agenda.note(ready_s + self._latency_s, arrived)
            return
        seconds = (nbytes + TCP_HEADERS_NBYTES * -(-nbytes // TCP_PAYLOAD_NBYTES)) / self._bytes_per_s
        begin = max(ready_s, self._out.get(sender, 0.0))
        self._out[sender] = begin + seconds

        def flow(now: float) -> None:
            free = max(now, self._in.get(receiver, 0.0)) + seconds
            self._in[receiver] = free
            self._agenda.note(free + self._latency_s, arrived)

        self._agenda.note(begin, flow)
