"""A transport and a clock for tests of a server's handler and its sessions."""

from __future__ import annotations

from collections.abc import Callable

from tests.server.conversation import make_plan
from thinwire.packets import pack, parse
from thinwire.runtime.serving import ServerHandler
from thinwire.schema import Join, Message, Resume
from thinwire.server.core import ServerCore
from thinwire.transports.base import UNAUTHENTICATED, Identity, Sender


class Notes(Sender):
    """Records a handler's calls. `identities` maps peers to their identities."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.ended: list[tuple[int, Message | None]] = []
        self.identities: dict[int, Identity] = {}
        self.limits: dict[int, tuple[int, Callable[[], None]]] = {}
        self.reserved: dict[int, int] = {}

    def identity(self, peer: int) -> Identity:
        return self.identities.get(peer, UNAUTHENTICATED)

    def send(self, peer: int, packet: bytes) -> None:
        self.sent.append((peer, packet))

    def close(self, peer: int, packet: bytes | None = None) -> None:
        self.ended.append((peer, None if packet is None else parse(packet)[0]))

    def call(self, callback: Callable[[], None]) -> None:
        callback()

    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None], pending_nbytes: int = 0) -> None:
        self.limits[peer] = nbytes, exceeded
        if pending_nbytes:
            self.reserved[peer] = pending_nbytes


def make(workers: int = 2) -> tuple[ServerHandler, Notes, ServerCore, list[int]]:
    notes, core, ends = Notes(), ServerCore(), list[int]()
    handler = ServerHandler(core, notes, lambda: ends.append(1))
    for rank in range(workers):
        handler.opened(rank)
        handler.received(rank, pack(Join(rank=rank, plan=make_plan(workers))))
    for rank in range(workers):
        handler.received(rank, pack(Resume(step=0)))
    return handler, notes, core, ends


def handling(core: ServerCore) -> Callable[[Sender], ServerHandler]:
    return lambda sender: ServerHandler(core, sender, lambda: None)


class Hours:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.time = 0.0
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        later = self.time + delay_s, callback
        self.waiting.append(later)
        return lambda: self.waiting.remove(later) if later in self.waiting else None

    def pass_by(self, seconds: float) -> None:
        self.time += seconds
        for when, callback in list(self.waiting):
            if when <= self.time:
                self.waiting.remove((when, callback))
                callback()


def joining(rank: int) -> bytes:
    return pack(Join(rank=rank, plan=make_plan(2)))
