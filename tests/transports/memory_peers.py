"""A peer group with all ranks in one process, for tests of its callers: messages wait in queues, ranks may leave."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from thinwire.errors import DeadlineError, ProtocolError, TransportError
from thinwire.transports.peers import PeerGroup, ReceiveBuffer, Transfer

Key = tuple[int, int, int]
"""Sender, receiver, tag."""


@dataclass
class Links:
    """The queues between the ranks."""

    messages: dict[Key, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    posted: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    gone: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def lose(self, rank: int) -> None:
        """From now on, messages to and from this rank fail; those that were sent before still arrive."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


@dataclass
class _Received:
    links: Links
    key: Key
    number: int
    buffer: ReceiveBuffer

    def wait(self, timeout: timedelta) -> None:
        messages = self.links.messages[self.key]
        with self.links.changed:
            here = self.links.changed.wait_for(
                lambda: len(messages) > self.number or self.key[0] in self.links.gone, timeout.total_seconds()
            )
            if len(messages) > self.number:
                data = messages[self.number]
                self.buffer.data[: len(data)] = data
                return
        if not here:
            raise DeadlineError(f"rank {self.key[0]} kept rank {self.key[1]} waiting")
        raise TransportError(f"rank {self.key[0]} is gone")


class _Sent:
    def wait(self, timeout: timedelta) -> None:
        """A message in a queue has left."""


class MemoryPeerGroup(PeerGroup):
    """One rank's way to the others of the same `Links`; `before_send` may keep it waiting."""

    before_send: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, links: Links, rank: int, size: int, timeout_s: float = 20.0) -> None:
        self.links, self.rank, self.size = links, rank, size
        self.timeout = timedelta(seconds=timeout_s)

    def receive(self, peer: int, buffer: ReceiveBuffer, tag: int) -> Transfer:
        key = (peer, self.rank, tag)
        with self.links.changed:
            number = self.links.posted[key]
            self.links.posted[key] += 1
        return Transfer(peer, _Received(self.links, key, number, buffer), buffer.data)

    def send(self, peer: int, data: bytearray, tag: int) -> Transfer:
        self.before_send()
        with self.links.changed:
            if {peer, self.rank} & self.links.gone:
                raise TransportError(f"rank {peer} is gone")
            self.links.messages[self.rank, peer, tag].append(bytes(data))
            self.links.changed.notify_all()
        return Transfer(peer, _Sent(), memoryview(data))

    def wait(self, transfer: Transfer, timeout: timedelta | None = None) -> memoryview:
        transfer.work.wait(timeout or self.timeout)
        return transfer.data


def groups(size: int, timeout_s: float = 20.0) -> list[MemoryPeerGroup]:
    """Returns the peer groups of all ranks."""
    links = Links()
    return [MemoryPeerGroup(links, rank, size, timeout_s) for rank in range(size)]


def on_every_rank(peers: list[MemoryPeerGroup], call: Callable[[MemoryPeerGroup], Any]) -> list[Any]:
    """Calls it on every rank at once; an error of ours is a result too."""

    def outcome(group: MemoryPeerGroup) -> Any:
        try:
            return call(group)
        except (ProtocolError, TransportError) as error:
            return error

    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(outcome, peers))
