"""Runs a worker's procedures on connections: sends what it wants sent, and blocks where it waits.

Messages are read by the thread that needs them, when it needs them. The transport's own threads move bytes meanwhile,
so nothing waits on this one; and the cores need no lock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from thinwire.errors import DeadlineError, ProtocolError, TransportError
from thinwire.packets import pack, parse
from thinwire.telemetry import Counters
from thinwire.transports.base import Connection
from thinwire.worker.conversation import Conversation
from thinwire.worker.effects import Poll, Procedure, Receive, Send, T


class WorkerDriver:
    """One worker's connections to its shards.

    Args:
        conversations: the worker's, one for each shard.
        connections: to the shards' servers, in the same order; closed with the driver.
        timeout_s: how long the slowest worker of a step may keep the others waiting, in seconds.
        counters: for the seconds spent waiting.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        connections: Sequence[Connection],
        *,
        timeout_s: float = 600.0,
        counters: Counters | None = None,
    ) -> None:
        self._conversations, self._connections = conversations, connections
        self._timeout_s = timeout_s
        self._counters = counters or Counters()

    def run(self, procedure: Procedure[T]) -> T:
        """Carries out a procedure's effects one by one; returns what it returns.

        Raises:
            DeadlineError: no message came in time.
            ProtocolError: a shard refused this worker, or broke the conversation.
            TransportError: a connection is lost.
        """
        while True:
            try:
                effect = next(procedure)
            except StopIteration as end:
                result: T = end.value
                return result
            match effect:
                case Send():
                    self._send(effect)
                case Receive():
                    self._receive(effect)
                case Poll():
                    with contextlib.suppress(DeadlineError):
                        self._receive_arrived(effect.shard)

    def close(self) -> None:
        """Leaves every shard in good order. A session that broke is only dropped."""
        for conversation, connection in zip(self._conversations, self._connections, strict=True):
            try:
                self.run(conversation.leave())
                while connection.receive(self._timeout_s) is not None:
                    pass
            except (TransportError, ProtocolError):
                pass
            finally:
                connection.close()

    @property
    def wire_nbytes(self) -> tuple[int, int]:
        """Bytes sent and received so far, frames and messages included."""
        sent = sum(connection.bytes_sent for connection in self._connections)
        return sent, sum(connection.bytes_received for connection in self._connections)

    def _send(self, effect: Send) -> None:
        try:
            self._connections[effect.shard].send(pack(effect.message, effect.frames))
        except TransportError:
            # A server that ends a session says why: better raised than that nothing can be sent any more.
            with contextlib.suppress(TransportError):
                self._receive_arrived(effect.shard)
            raise

    def _receive(self, effect: Receive) -> None:
        connection = self._connections[effect.shard]
        begin = time.perf_counter()
        try:
            packet = connection.receive(self._timeout_s)
        except DeadlineError:
            raise DeadlineError(
                f"{connection.address}: waited {self._timeout_s:g} s for {effect.awaited}. Another worker may be stuck "
                "or slow; `timeout_s` sets how long to wait"
            ) from None
        finally:
            self._counters.add("wait_seconds", time.perf_counter() - begin)
        if packet is None:
            raise TransportError(
                f"{connection.address}: the server ended the session while we waited for {effect.awaited}"
            )
        self._conversations[effect.shard].received(*parse(packet))

    def _receive_arrived(self, shard: int) -> None:
        """Takes every message that has arrived; raises DeadlineError after the last."""
        while (packet := self._connections[shard].receive(0)) is not None:
            self._conversations[shard].received(*parse(packet))
