"""The servers of a run with a computed clock, and the connections of workers to them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from thinwire.errors import DeadlineError, TransportError
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection, wire_nbytes
from thinwire.transports.memory import MemoryServer

if TYPE_CHECKING:
    from thinwire.jobs.modelled import Cluster, Worker


class Shard:
    """One server, whose sessions are those of the memory transport; messages come to it when their time has come."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self._cluster, self._index = cluster, index
        self.server = MemoryServer(serving(ServerCore()))
        self._connections: list[ModelledConnection] = []
        self._free_s = 0.0

    @property
    def node(self) -> str:
        """Whose link its messages cross."""
        return self._cluster.node(self._index)

    def connect(self, worker: Worker) -> ModelledConnection:
        """Begins a worker's session."""
        connection = ModelledConnection(self._cluster, worker, self, self.server.connect())
        self._connections.append(connection)
        return connection

    def handle(self, call: Callable[[], None], nbytes: int, now_s: float) -> None:
        """Has the server take a message, once it is free, and sends what it answers."""
        if self._free_s > now_s:
            self._cluster.agenda.note(self._free_s, partial(self.handle, call, nbytes))
            return
        began_s = time.thread_time()
        call()
        self.work(now_s, time.thread_time() - began_s + self._message_s(nbytes))
        for connection in self._connections:
            connection.answered()

    def send(self, worker: str, nbytes: int, arrived: Callable[[float], None]) -> None:
        """Sends a message as soon as the server has done what it is at."""
        free_s = self.work(self._free_s, self._message_s(nbytes))
        self._cluster.send(self.node, worker, nbytes, free_s, arrived)

    def work(self, begin_s: float, seconds: float) -> float:
        """Keeps the server and a processor busy; returns when the server is free again."""
        self._free_s = begin_s + self._cluster.book(begin_s, seconds)
        return self._free_s

    def _message_s(self, nbytes: int) -> float:
        return self._cluster.costs.server_message_s + nbytes * self._cluster.costs.byte_s


class ModelledConnection(Connection):
    """A worker's session with a shard; a message arrives when the links have carried it.

    Args:
        cluster: whose links they are.
        worker: whose session it is.
        shard: with whom.
        inner: the session itself, on the memory transport.
    """

    def __init__(self, cluster: Cluster, worker: Worker, shard: Shard, inner: Connection) -> None:
        self._cluster, self._worker, self._shard, self._inner = cluster, worker, shard, inner
        self._arrived: deque[bytes | None] = deque()
        self._over = False
        self.address = inner.address

    def send(self, packet: bytes) -> None:
        self.bytes_sent += wire_nbytes(packet)
        self._leave(partial(self._inner.send, packet), wire_nbytes(packet))

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        if timeout_s == 0 and not self._arrived:
            self._worker.let_others(until_woken=False)
            if not self._arrived:
                raise DeadlineError(f"nothing has come from {self.address}")
        while not self._arrived:
            self._worker.let_others(until_woken=True)
        packet = self._arrived.popleft()
        if packet is not None:
            self.bytes_received += wire_nbytes(packet)
        return packet

    def close(self, timeout_s: float = 30.0) -> None:
        self._leave(self._inner.close, 0)

    def abort(self) -> None:
        self._leave(self._inner.abort, 0)

    def answered(self) -> None:
        """Sends to the worker what the server has said in this session. For the cluster's thread."""
        while not self._over:
            try:
                packet = self._inner.receive(0)
            except DeadlineError:
                return
            except TransportError:  # the worker has left
                packet = None
            self._over = packet is None
            nbytes = 0 if packet is None else wire_nbytes(packet)
            self._shard.send(self._worker.name, nbytes, partial(self._arrive, packet))

    def _leave(self, call: Callable[[], None], nbytes: int) -> None:
        now_s = self._worker.now()
        self._worker.book_message(now_s, nbytes)
        handle = partial(self._shard.handle, call, nbytes)
        self._cluster.send(self._worker.name, self._shard.node, nbytes, now_s, handle)

    def _arrive(self, packet: bytes | None, now_s: float) -> None:
        self._worker.book_message(now_s, 0 if packet is None else wire_nbytes(packet))
        self._arrived.append(packet)
        self._worker.wake(now_s)
