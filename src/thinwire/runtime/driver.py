"""Runs a worker's procedures on connections to the shards: how messages are sent and waited for.

`model_hooks` says when a procedure runs, and the worker what it sends and applies. The thread that needs a message
reads it. The transport's own threads move bytes meanwhile, so nothing waits on this one; and the cores need no lock, as
one procedure runs at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from thinwire.cautions import notice
from thinwire.errors import DeadlineError, ProtocolError, SessionLostError, TransportError
from thinwire.packets import pack, parse
from thinwire.quantities import counted
from thinwire.schema import Members
from thinwire.telemetry import Counters
from thinwire.transports.base import Connection
from thinwire.worker.conversation import Conversation
from thinwire.worker.effects import Poll, Procedure, Receive, Send, T

LOOK_S = 1.0
"""After so many seconds of waiting for one shard the connections to the others are read, too: wherever a worker waits,
it notices a shard that was lost."""

GOODBYE_S = 0.5
"""How long the end of a connection may take, where there is no time left to wait for its shard."""


class WorkerDriver:
    """One worker's connections to its shards.

    Args:
        conversations: the worker's, one for each shard.
        connections: to the shards' servers, in the same order; closed with the driver.
        timeout_s: how long the slowest worker of a step may keep the others waiting, in seconds.
        counters: for the seconds spent in procedures, and of those the seconds spent waiting.
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
        self._lost = False
        self._running = threading.RLock()
        self._runner: int | None = None

    def run(self, procedure: Procedure[T]) -> T:
        """Carries out a procedure's effects one by one; returns what it returns.

        One procedure at a time: the backward pass of a model on several devices has a thread for each.

        Raises:
            DeadlineError: no message came in time.
            ProtocolError: a shard refused this worker, or broke the conversation.
            TransportError: a connection is lost.
        """
        if torch.is_inference_mode_enabled():  # an evaluation: training could not change later what is made in it
            with torch.inference_mode(False), torch.no_grad():
                return self.run(procedure)
        with self._running:
            begin, outer, self._runner = time.perf_counter(), self._runner, threading.get_ident()
            try:
                return self._carry_out(procedure)
            except SessionLostError:
                self._lost = True
                raise
            finally:
                self._runner = outer
                self._counters.add("exchange_seconds", time.perf_counter() - begin)

    @property
    def runs_here(self) -> bool:
        """Whether this thread is carrying out a procedure: a signal's handler has come in between."""
        return self._runner == threading.get_ident()

    def _carry_out(self, procedure: Procedure[T]) -> T:
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
                    self._receive_arrived(effect.shard)

    def close(self, within_s: float | None = None, failure: str = "") -> None:
        """Leaves every shard in good order, where one was lost to come again. A session that broke is only dropped.

        All shards are told before the answer of any is waited for: one that is silent keeps no other from it.

        Args:
            within_s: where something went wrong here, for how long the shards together may take to answer, in seconds;
                nothing is raised then, and a shard that has not let this worker in is told nothing: the worker may come
                again. None: as long as in a step.
            failure: what went wrong here, in words, for the other workers; given with `within_s` alone.

        Raises:
            DeadlineError: a shard did not confirm the end, and all have been left; not with `within_s`.
        """
        until = time.perf_counter() + (self._timeout_s if within_s is None else within_s)

        def left() -> float:
            return max(0.0, until - time.perf_counter())

        failures: list[Exception] = []
        if self._running.acquire(timeout=left()):  # unless another thread waits for an answer for longer
            try:
                for conversation in self._conversations:
                    if within_s is None or conversation.joined:
                        with suppress(TransportError, ProtocolError):
                            self.run(conversation.leave(returning=self._lost, failure="" if self._lost else failure))
            finally:
                self._running.release()
        for connection in self._connections:
            with suppress(TransportError, ProtocolError):
                while connection.receive(left()) is not None:
                    pass
            try:
                connection.close(*(() if within_s is None else (max(GOODBYE_S, left()),)))
            except TransportError as error:  # the other shards are left as well
                failures.append(error)
        if failures and within_s is None:
            raise failures[0]

    @property
    def wire_nbytes(self) -> tuple[int, int]:
        """Bytes sent and received so far, frames and messages included."""
        sent = sum(connection.bytes_sent for connection in self._connections)
        return sent, sum(connection.bytes_received for connection in self._connections)

    def _send(self, effect: Send) -> None:
        try:
            self._connections[effect.shard].send(pack(effect.message, effect.frames))
            return
        except TransportError as error:
            broken = error
        # A server that ends a session says why: better raised, and alone, than that nothing can be sent any more.
        with suppress(TransportError):
            self._receive_arrived(effect.shard)
        raise broken

    def _receive(self, effect: Receive) -> None:
        connection = self._connections[effect.shard]
        begin = time.perf_counter()
        try:
            while True:
                left = self._timeout_s - (time.perf_counter() - begin)
                try:
                    packet = connection.receive(min(left, LOOK_S) if len(self._connections) > 1 else left)
                    break
                except DeadlineError:
                    if left <= LOOK_S or len(self._connections) == 1:
                        raise
                for other in range(len(self._connections)):
                    if other != effect.shard:
                        self._receive_arrived(other)
        except DeadlineError:
            raise DeadlineError(
                f"{connection.address}: waited {self._timeout_s:g} s for {effect.awaited}. Another worker may be stuck "
                "or slow, or has not come; `timeout_s` sets how long to wait"
            ) from None
        finally:
            self._counters.add("wait_seconds", time.perf_counter() - begin)
        if packet is None:
            raise TransportError(
                f"{connection.address}: the server ended the session while we waited for {effect.awaited}"
            )
        self._take(effect.shard, packet)

    def _receive_arrived(self, shard: int) -> None:
        """Takes every message that has arrived."""
        with suppress(DeadlineError):
            while (packet := self._connections[shard].receive(0)) is not None:
                self._take(shard, packet)

    def _take(self, shard: int, packet: bytes) -> None:
        conversation = self._conversations[shard]
        conversation.received(*parse(packet))
        for told in conversation.notices:
            if shard == 0 and told.reason:  # all shards say the same
                self._tell(told)
        conversation.notices.clear()

    def _tell(self, told: Members) -> None:
        here = len(told.ranks)
        if told.interrupted:
            state = "it is waited for, for as long as the server says"
        elif here >= told.least:
            state = f"the training goes on with {counted(here, 'worker')}"
        else:
            state = f"{here} workers are here, and the training waits until they are {told.least}"
        notice(f"{told.reason}; {state}")
