"""A cluster whose every move is chosen: real optimizers and cores, one thread at a time, messages delivered at will.

Each worker runs in a thread of its own, and only while the scheduler lets it: until it waits for a message that has
not been delivered, or pauses by itself. Messages keep their order on each way, as on a connection, and nothing else is
promised. So a schedule is a list of choices, and hypothesis looks for the one that breaks a policy.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.errors import DeadlineError
from thinwire.packets import EncodedTensor, parse
from thinwire.runtime.serving import serving
from thinwire.schema import Message
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection, Handler, Sender

Work = Callable[["Actor"], Any]


class Stuck(AssertionError):
    """Nothing can move and a worker still waits."""


class Actor:
    """One worker: a thread that runs when it is told to."""

    def __init__(self, network: Network, rank: int, work: Work) -> None:
        self.rank, self.network = rank, network
        self.waits_for: Wire | None = None
        self.result: Any = None
        self.failure: BaseException | None = None
        self.done = False
        self._go, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Work) -> None:
        self._go.wait()
        try:
            self.result = work(self)
        except BaseException as error:
            self.failure = error
        self.done = True
        self._stopped.set()

    def pause(self) -> None:
        """Lets others move; called by the worker itself.

        A run that was given up has no scheduler, and its optimizers may say goodbye when the process ends.
        """
        if self.network.over:
            raise Stuck("the run was given up")
        self._go.clear()
        self._stopped.set()
        self._go.wait()
        if self.network.over:
            raise Stuck("the run was given up")

    def resume(self) -> None:
        """Runs until the worker pauses, waits or ends; called by the scheduler."""
        self._stopped.clear()
        self._go.set()
        self._stopped.wait()

    @property
    def can_move(self) -> bool:
        return not self.done and (self.waits_for is None or bool(self.waits_for.inbox) or self.waits_for.ended)


class Wire(Connection):
    """The way between one worker and one shard, with what is under way on it."""

    def __init__(self, network: Network, actor: Actor, shard: int, peer: int) -> None:
        self.address, self.shard, self.peer = f"shard {shard}", shard, peer
        self.up: deque[bytes] = deque()
        self.down: deque[bytes | None] = deque()
        self.inbox: deque[bytes] = deque()
        self.ended = False
        self._network, self._actor = network, actor

    def send(self, packet: bytes) -> None:
        self.up.append(packet)
        self._actor.pause()

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        while not self.inbox:
            if self.ended:
                return None
            if timeout_s == 0:
                raise DeadlineError("nothing has come")
            self._actor.waits_for = self
            self._actor.pause()
        self._actor.waits_for = None
        return self.inbox.popleft()

    def close(self, timeout_s: float = 30.0) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True


class _Outbox(Sender):
    def __init__(self, wires: list[Wire]) -> None:
        self._wires = wires

    def send(self, peer: int, packet: bytes) -> None:
        self._wires[peer].down.append(packet)

    def close(self, peer: int, packet: bytes | None = None) -> None:
        if packet is not None:
            self.send(peer, packet)
        self._wires[peer].down.append(None)

    def call(self, callback: Callable[[], None]) -> None:
        callback()

    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None], pending_nbytes: int = 0) -> None:
        """Workers of ours keep to theirs."""


class Network:
    """Shards, workers, and the messages between them.

    Args:
        work: what each worker does, given its `Actor`.
        workers: how many.
        servers: how many shards.
        chance: makes every choice.
        speeds: how likely each worker is to move next; one of speed 0 moves only when nothing else can.

    Attributes:
        heard: every message that a shard has been given: (shard, rank, message), in order.
        said: every message of a shard, once: (shard, message, frames), in order.
    """

    def __init__(
        self, work: Work, *, workers: int, chance: random.Random, servers: int = 1, speeds: Sequence[int] = ()
    ) -> None:
        self.cores = [ServerCore() for _ in range(servers)]
        self.heard: list[tuple[int, int, Message]] = []
        self.said: list[tuple[int, Message, tuple[EncodedTensor, ...]]] = []
        self.over = False
        self._chance = chance
        self._speeds = speeds or [1] * workers
        self._wires: list[list[Wire]] = [[] for _ in range(servers)]
        self._handlers: list[Handler] = []
        for wires, core in zip(self._wires, self.cores, strict=True):
            self._handlers.append(serving(core)(_Outbox(wires)))
        self.actors = [Actor(self, rank, work) for rank in range(workers)]

    def connect(self, actor: Actor) -> list[Connection]:
        """A worker's connections, one to each shard."""
        made: list[Connection] = []
        for shard, wires in enumerate(self._wires):
            wires.append(Wire(self, actor, shard, len(wires)))
            made.append(wires[-1])
        return made

    def run(self) -> list[Any]:
        """Moves until all are done; returns what the workers returned, or raises the first failure."""
        try:
            while self.move():
                pass
            for actor in self.actors:
                if actor.failure is not None:
                    raise actor.failure
            if waiting := [actor.rank for actor in self.actors if not actor.done]:
                raise Stuck(f"workers {waiting} wait for ever; the shards are at {[core.step for core in self.cores]}")
        finally:
            self.give_up()
        return [actor.result for actor in self.actors]

    def move(self, only: Sequence[int] | None = None) -> bool:
        """One choice: a worker goes on, or a message arrives. `only` these workers; the others are silent."""
        moves: list[tuple[int, Callable[[], None]]] = [
            (self._speeds[actor.rank], actor.resume)
            for actor in self.actors
            if (only is None or actor.rank in only) and actor.can_move
        ]
        for wires in self._wires:
            for wire in wires:
                if wire.up:
                    moves.append((2, lambda wire=wire: self._deliver_up(wire)))  # type: ignore[misc]
                if wire.down:
                    moves.append((2, lambda wire=wire: self._deliver_down(wire)))  # type: ignore[misc]
        if not moves:
            return False
        likely = [move for weight, move in moves for _ in range(weight)]
        self._chance.choice(likely or [move for _, move in moves])()
        return True

    def give_up(self) -> None:
        """Ends what still runs."""
        self.over = True
        for actor in self.actors:
            while not actor.done:
                actor.resume()

    def _deliver_up(self, wire: Wire) -> None:
        packet = wire.up.popleft()
        message, _ = parse(packet)
        self.heard.append((wire.shard, wire._actor.rank, message))
        handler = self._handlers[wire.shard]
        before = [len(other.down) for other in self._wires[wire.shard]]
        handler.received(wire.peer, packet)
        fresh: dict[int, bytes] = {}
        for other, known in zip(self._wires[wire.shard], before, strict=True):
            for sent in list(other.down)[known:]:
                if sent is not None:
                    fresh[id(sent)] = sent
        for sent in fresh.values():
            answer, frames = parse(sent)
            self.said.append((wire.shard, answer, frames))

    def _deliver_down(self, wire: Wire) -> None:
        packet = wire.down.popleft()
        if packet is None:
            wire.ended = True
        else:
            wire.inbox.append(packet)
