"""The worker core on a connection. Messages are read by the thread that needs them, when it needs them.

The transport's own threads move bytes meanwhile, so nothing waits on this one; and the cores need no lock.
"""

from __future__ import annotations

import contextlib
import time

from thinwire.errors import DeadlineError, ProtocolError, TransportError
from thinwire.runtime.messages import from_packet, to_packet
from thinwire.telemetry import Counters
from thinwire.transports.base import Connection
from thinwire.worker.core import Outgoing, Update, WorkerCore


class Session:
    """One worker's session with one shard.

    Args:
        connection: to the shard's server; closed with the session.
        core: the worker's side.
        timeout_s: how long the slowest worker of a step may keep the others waiting, in seconds.
    """

    def __init__(self, connection: Connection, core: WorkerCore, *, timeout_s: float = 600.0) -> None:
        self.core = core
        self.counters = Counters()
        self._connection = connection
        self._timeout_s = timeout_s

    def join(self) -> bool:
        """Joins the training; returns whether the server asks this worker for the initial values."""
        self.send(self.core.join())
        while self.core.welcome is None:
            self._receive("the server's welcome")
        return self.core.welcome.send_values

    def send(self, outgoing: Outgoing | None) -> None:
        """Sends a message, where there is one."""
        if outgoing is None:
            return
        try:
            self._connection.send(to_packet(outgoing.message, outgoing.frames))
        except TransportError:
            self._hear_last_words()
            raise

    def take(self, table: int, *, fully: bool = False) -> list[Update]:
        """Returns what leads the model's copy of a table as far as the policy wants it (`fully`: as far as there is).

        Waits until it is there.
        """
        updates = self.core.take(table)
        while self.core.wants(table, fully=fully):
            self._receive(f"{self.core.plan.tables[table].name!r} of step {self.core.step}")
            updates += self.core.take(table)
        return updates

    def drain(self) -> None:
        """Hears what has come already, without waiting: for policies under which newer is better and not required."""
        with contextlib.suppress(DeadlineError):
            while (packet := self._connection.receive(0)) is not None:
                self.core.received(*from_packet(packet))

    def maxima(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Says one number per table and returns the largest of all workers' (scalar sharing)."""
        self.send(self.core.scalars(values))
        while self.core.step not in self.core.maxima:
            self._receive(f"the shared scales of step {self.core.step}")
        return self.core.maxima.pop(self.core.step)

    def is_last(self) -> bool:
        """Whether the step that was pushed last is the training's last one; waits for the server's first word on it."""
        while self.core.newest < self.core.step:
            self._receive(f"step {self.core.step}")
        return self.core.ended

    def close(self) -> None:
        """Leaves in good order. A session that broke is only dropped."""
        try:
            self.send(self.core.leave())
            while self._connection.receive(self._timeout_s) is not None:
                pass
        except (TransportError, ProtocolError):
            pass
        finally:
            self._connection.close()

    @property
    def address(self) -> str:
        """The shard's, for messages to people."""
        return self._connection.address

    @property
    def wire_nbytes(self) -> tuple[int, int]:
        """Bytes sent and received so far, frames and messages included."""
        return self._connection.bytes_sent, self._connection.bytes_received

    def _hear_last_words(self) -> None:
        """A server that ends a session says why: better raised than that nothing can be sent any more."""
        with contextlib.suppress(TransportError):
            while (packet := self._connection.receive(0)) is not None:
                self.core.received(*from_packet(packet))

    def _receive(self, what: str) -> None:
        begin = time.perf_counter()
        try:
            packet = self._connection.receive(self._timeout_s)
        except DeadlineError:
            raise DeadlineError(
                f"{self._connection.address}: waited {self._timeout_s:g} s for {what}. Another worker may be stuck "
                "or slow; `timeout_s` sets how long to wait"
            ) from None
        finally:
            self.counters.add("wait_seconds", time.perf_counter() - begin)
        if packet is None:
            raise TransportError(f"{self._connection.address}: the server ended the session while we waited for {what}")
        self.core.received(*from_packet(packet))
