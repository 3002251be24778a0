"""Connections between simulated workers and servers: in order and whole, late, and broken at any moment.

It promises what `transports/base.py` promises and nothing more: the packets of one connection arrive once and in order,
or the connection breaks. Each end learns of a break at a time of its own; what was under way then arrives in part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.scheduler import Host, Killed, Scheduler
from thinwire.errors import TransportError
from thinwire.packets import kind_of
from thinwire.schema import Delta, Merged
from thinwire.transports.base import Handler, HandlerFactory, Sender

if TYPE_CHECKING:
    from tests.simulation.processes import Processes
    from tests.simulation.worker import WorkerProcess

KEEPALIVE_S = 0.4
"""After so much silence an end takes its connection for broken."""
UP, DOWN = "up", "down"


@dataclass(eq=False)
class Link:
    """One connection, with both of its ends; a stranger's has rank −1, and no owner."""

    network: Network
    rank: int
    host: Host
    server: SimulatedServer
    owner: WorkerProcess | None
    wake: Callable[[], None]
    peer: int = -1
    inbox: deque[bytes] = field(default_factory=deque)
    ended: bool = False
    """The server ended it in good order."""
    error: str | None = None
    """What the worker's end knows to have broken it."""
    limit: tuple[int, Callable[[], None]] | None = None
    """Bytes of a packet that the server takes, and what it does about a larger one."""
    severed: bool = False
    """Nothing arrives any more."""
    last: dict[str, float] = field(default_factory=lambda: {UP: 0.0, DOWN: 0.0})
    under_way: dict[str, list[list[bool]]] = field(default_factory=lambda: {UP: [], DOWN: []})

    def send(self, packet: bytes) -> None:
        if self.error is not None:
            raise TransportError(self.error)
        if self.ended:
            raise TransportError("the session has ended")
        self.carry(UP, lambda: self.server.arrived(self, packet))

    def receive(self) -> bytes | None:
        if self.inbox:
            return self.inbox.popleft()
        if self.error is not None:
            raise TransportError(self.error)
        if self.ended:
            return None
        raise BlockingIOError

    def close(self) -> None:
        if not self.ended and self.error is None:
            self.error = "this end has closed the session"
            self.carry(UP, lambda: self.server.closed(self, None))

    def abort(self) -> None:
        if self.error is None:
            self.error = "this end has gone away"
            if not self.severed:
                self.carry(UP, lambda: self.server.closed(self, "the peer went away without saying so"))

    def carry(self, way: str, call: Callable[[], None]) -> None:
        """Lets something happen at the other end, after everything that was sent before."""
        if self.severed:
            return
        time = max(self.last[way], self.network.arrival(self, way))
        self.last[way] = time
        arrives = [True]
        self.under_way[way].append(arrives)
        host = self.server.host if way == UP else self.host

        def arrive() -> None:
            if arrives[0]:
                self.under_way[way].remove(arrives)
                host.deliver(call)

        self.network.scheduler.at(time, arrive)

    def sever(self, error: str) -> None:
        """Breaks it: some of what is under way arrives, in order, and each end learns of it in its own time."""
        if self.severed:
            return
        self.severed = True
        chance = self.network.chance
        for each in self.under_way.values():
            for arrives in each[chance.randint(0, len(each)) :]:
                arrives[0] = False
            each[:] = [arrives for arrives in each if arrives[0]]
        now = self.network.scheduler.now
        up, down = (max(now, self.last[way] if self.under_way[way] else now) for way in (UP, DOWN))
        at = self.network.scheduler.at
        at(
            up + chance.random() * KEEPALIVE_S,
            lambda: self.server.host.deliver(lambda: self.server.closed(self, error)),
        )
        at(down + chance.random() * KEEPALIVE_S, lambda: self.host.deliver(lambda: self.broke(error)))

    def broke(self, error: str) -> None:
        """The worker's end learns of a break."""
        if self.error is None and not self.ended:
            self.error = error
            self.wake()

    def came(self, packet: bytes) -> None:
        if self.error is None and not self.ended:
            self.inbox.append(packet)
            self.wake()

    def over(self) -> None:
        if self.error is None:
            self.ended = True
            self.wake()


class SimulatedServer(Sender):
    """The transport's half of one server process."""

    def __init__(self, cluster: Processes, host: Host, factory: HandlerFactory, index: int) -> None:
        self.host, self._cluster, self._index = host, cluster, index
        self._links: dict[int, Link] = {}
        self._num_opened = 0
        self._inside = 0
        self._answers = False
        self._calls: deque[Callable[[], None]] = deque()
        self.handler: Handler = factory(self)

    # ---- what comes

    def opened(self, link: Link) -> None:
        link.peer, self._num_opened = self._num_opened, self._num_opened + 1
        self._links[link.peer] = link
        self._run(lambda: self.handler.opened(link.peer))

    def arrived(self, link: Link, packet: bytes) -> None:
        if link.peer in self._links:
            self._run(lambda: self._received(link, packet))

    def _received(self, link: Link, packet: bytes) -> None:
        if link.limit is not None and len(packet) > link.limit[0]:
            link.limit[1]()
            return
        watch = self._cluster.watch
        watch.owner, self._answers = link.owner, False
        try:
            self.handler.received(link.peer, packet)
        finally:
            watch.owner = None

    def closed(self, link: Link, error: str | None) -> None:
        if self._links.pop(link.peer, None) is not None:
            self._run(lambda: self.handler.closed(link.peer, error))

    # ---- what the handler says

    def send(self, peer: int, packet: bytes) -> None:
        if self._answers:
            self._cluster.reached_at_server("update.sent", self._index)
        self._answers = kind_of(packet) in (Delta, Merged)
        link = self._links.get(peer)
        if link is not None:
            link.carry(DOWN, lambda: link.came(packet))

    def close(self, peer: int, packet: bytes | None = None) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        if packet is not None:
            self.send(peer, packet)
        link.carry(DOWN, link.over)
        del self._links[peer]
        self._calls.append(lambda: self.handler.closed(peer, None))
        self._work()

    def call(self, callback: Callable[[], None]) -> None:
        self._run(callback)

    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None], pending_nbytes: int = 0) -> None:
        if peer in self._links:
            self._links[peer].limit = nbytes, exceeded

    def die(self) -> None:
        self.host.die()
        for link in self._cluster.network.open_links:
            if link.server is self:
                link.sever("connection reset: the server went away")
        self._links.clear()
        self._calls.clear()

    @property
    def num_links(self) -> int:
        return len(self._links)

    def _run(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._work()

    def _work(self) -> None:
        """One call of the handler at a time."""
        if self._inside:
            return
        self._inside += 1
        try:
            while self._calls and self.host.alive:
                self._calls.popleft()()
        except Killed:
            return
        finally:
            self._inside -= 1


@dataclass
class Partition:
    """No packets one way, or both, between a worker and all servers."""

    ranks: frozenset[int]
    ways: frozenset[str]
    end: float


class Network:
    """All links, and what keeps their packets."""

    def __init__(self, scheduler: Scheduler, chance: Random, latency: tuple[float, float]) -> None:
        self.scheduler, self.chance, self._latency = scheduler, chance, latency
        self.links: list[Link] = []
        self._partitions: list[Partition] = []
        self.slow: dict[int, float] = {}
        """How many times longer packets of a worker take."""

    def arrival(self, link: Link, way: str) -> float:
        """When a packet sent now arrives, if its link holds."""
        delay = self.chance.uniform(*self._latency) * self.slow.get(link.rank, 1.0)
        return max(self.scheduler.now, self.blocked_until(link.rank, way)) + delay

    def blocked_until(self, rank: int, *ways: str) -> float:
        """When the last partition ends that keeps a worker's packets."""
        self._partitions = [each for each in self._partitions if each.end > self.scheduler.now]
        return max((each.end for each in self._partitions if rank in each.ranks and each.ways & set(ways)), default=0.0)

    def partition(self, ranks: frozenset[int], ways: frozenset[str], seconds: float) -> None:
        """Keeps packets; connections that are silent for too long break."""
        now = self.scheduler.now
        self._partitions.append(Partition(ranks, ways, now + seconds))
        if seconds > KEEPALIVE_S:
            self.fall_silent(ranks)

    def fall_silent(self, ranks: frozenset[int]) -> None:
        """Breaks some workers' connections after the time of keepalive."""
        for link in self.open_links:
            if link.rank in ranks:
                self.scheduler.after(KEEPALIVE_S, partial(link.sever, "no sign of life"))

    def cut(self, rank: int) -> None:
        for link in self.open_links:
            if link.rank == rank:
                link.sever("cut")

    @property
    def open_links(self) -> list[Link]:
        self.links = [link for link in self.links if not link.severed and not link.ended and link.error is None]
        return self.links

    def dial(
        self, rank: int, host: Host, server: SimulatedServer, owner: WorkerProcess | None, wake: Callable[[], None]
    ) -> tuple[Link, float]:
        """Returns a new connection, and after how many seconds it is there."""
        link = Link(self, rank, host, server, owner, wake)
        until = max(self.scheduler.now, self.blocked_until(rank, UP, DOWN))
        delay = 2 * self.chance.uniform(*self._latency)
        self.links.append(link)
        return link, until + delay - self.scheduler.now
