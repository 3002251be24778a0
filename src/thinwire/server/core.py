"""The parameter server as a pure state machine: (peer, message, frames) in, effects out.

It owns no socket, thread or clock. Updates happen table by table, so an early layer's never waits for a late one's
gradient: each when as many gradients are in as the consistency policy asks for. What travels down is encoded once for
all workers that hold the same copy.

A peer that breaks the conversation is refused with the reason and closed; since no step can then complete, the
others are told as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs.tensors import FloatArray
from thinwire.errors import ConfigError, FrameError, NonFiniteError, ProtocolError
from thinwire.policies.consistency import Bsp, Consistency, consistency
from thinwire.schema import (
    PROTOCOL,
    Delta,
    Join,
    Leave,
    Message,
    Plan,
    Push,
    Refused,
    Scalars,
    Values,
    Welcome,
)
from thinwire.server.agreement import check_plan, difference, usable_codecs
from thinwire.server.rounds import Digests, Maxima
from thinwire.server.table import Table
from thinwire.server.updater import Updater
from thinwire.telemetry import Counters

MAX_REASON = 2000
"""Characters. A reason may quote what a peer sent, and the answer to a large message must not be larger still."""
MAX_STEP = 2**53
"""For a shard of buffers alone, which no update of its own bounds."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to some peers."""

    peers: tuple[int, ...]
    message: Message
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """End a peer's session, after a last word."""

    peer: int
    message: Message | None = None


Effect = Send | Close


class ServerCore:
    """One shard.

    Args:
        rejoin: whether the shard waits for a worker that went away (it comes back with `Join.have`), or
            ends the training at once.
    """

    def __init__(self, *, rejoin: bool = False) -> None:
        self.counters = Counters()
        self.plan: Plan | None = None
        self.tables: list[Table] = []
        self.finished = False
        self._rejoin = rejoin
        self._updater: Updater | None = None
        self._ranks: dict[int, int] = {}
        self._came_back: set[int] = set()
        self._left: set[int] = set()
        self._initialised = False
        self._failed: str | None = None
        self._final: int | None = None
        self._rates: dict[int, tuple[float, ...]] = {}
        self._policy: Consistency = Bsp()
        self._maxima = Maxima()
        self._digests = Digests()

    # ---- events

    def received(self, peer: int, message: Message, frames: tuple[bytes, ...] = ()) -> list[Effect]:
        """Takes one message of a peer and returns what to do."""
        if self._failed is not None:
            return [Close(peer, _refused(self._failed))]
        try:
            return self._dispatch(peer, message, frames)
        except (ProtocolError, ConfigError) as error:
            rank = self._ranks.get(peer)
            if rank is None:
                return [Close(peer, _refused(str(error)))]
            return self._fail(f"worker {rank}: {error}")
        except FrameError as error:  # a gradient may have waited for its turn: the text says whose it is
            return self._fail(str(error))
        except NonFiniteError as error:
            return self._fail(f"the training has diverged: {error}. Use a smaller learning rate or sparsity")

    def closed(self, peer: int, error: str | None) -> list[Effect]:
        """A session is over. In the middle of training that ends it for all, unless the shard waits for rejoins."""
        rank = self._ranks.pop(peer, None)
        if rank is None or self._failed is not None:
            return []
        if self._rejoin:
            self._came_back.add(rank)
            return []
        return self._fail(f"worker {rank} went away at step {self.step}: {error or 'it closed its session'}")

    # ---- the conversation

    def _dispatch(self, peer: int, message: Message, frames: tuple[bytes, ...]) -> list[Effect]:
        if isinstance(message, Join):
            return self._join(peer, message)
        if peer not in self._ranks:
            raise ProtocolError(f"{type(message).__name__} came before Join")
        match message:
            case Push():
                return self._push(peer, message, frames)
            case Values():
                return self._values(peer, message, frames)
            case Scalars():
                return self._scalars(peer, message)
            case Leave():
                return self._leave(peer)
            case _:
                raise ProtocolError(f"a worker does not send {type(message).__name__}")

    def _join(self, peer: int, join: Join) -> list[Effect]:
        if join.protocol != PROTOCOL:
            raise ProtocolError(f"the worker speaks protocol {join.protocol}, this server {PROTOCOL}")
        if peer in self._ranks:
            raise ProtocolError("a second Join in one session")
        if self.plan is None:
            check_plan(join.plan)
        elif reason := difference(self.plan, join.plan):
            raise ProtocolError(reason)
        if not 0 <= join.rank < join.plan.workers:
            raise ProtocolError(f"rank {join.rank}; this training has ranks 0 … {join.plan.workers - 1}")
        if self.plan is None:
            self._create(join.plan)
        if join.rank in self._ranks.values():
            raise ProtocolError(f"rank {join.rank} is taken: every worker needs a rank of its own")
        if join.rank in self._left:
            raise ProtocolError(f"worker {join.rank} has left this training, and it does not begin again")
        self._ranks[peer] = join.rank
        ask = join.rank == 0 and not self._initialised
        effects: list[Effect] = [
            Send((peer,), Welcome(send_values=ask, step=self.step, final=-1 if self._final is None else self._final))
        ]
        if self._initialised:
            effects += self._catch_up(peer, join.have)
        return effects

    def _create(self, plan: Plan) -> None:
        codecs = usable_codecs(plan)
        try:
            policy = consistency(plan.consistency)
            tables = [
                Table(spec, codecs[spec.up], codecs[spec.down], plan.workers, policy, plan.downlink)
                for spec in plan.tables
            ]
        except (MemoryError, RuntimeError) as error:  # NumPy's and torch's ways to say so
            raise ProtocolError(f"the tables do not fit the server's memory: {error}") from error
        values = [None if table.spec.state else table.values for table in tables]
        if any(value is not None for value in values):
            self._updater = Updater(plan, values)
        # A shard may hold nothing, where there are more of them than tables: then nobody has values to send.
        self._initialised = not tables
        self.plan, self.tables, self._policy = plan, tables, policy

    def _catch_up(self, peer: int, have: tuple[int, ...]) -> list[Effect]:
        """What leads a worker from the versions it has to ours: deltas where the log has them, else whole tables."""
        rank = self._ranks[peer]
        versions = have if len(have) == len(self.tables) else (-1,) * len(self.tables)
        effects: list[Effect] = []
        whole = []
        for index, (table, version) in enumerate(zip(self.tables, versions, strict=True)):
            missing = table.since(version) if version >= 0 and not self._policy.immediate else None
            if missing is None:
                whole.append(index)
                continue
            first = table.version - len(missing) + 1
            for offset, frame in enumerate(missing):
                effects.append(Send((peer,), Delta(version=first + offset, tables=(index,)), (frame,)))
        if whole:
            give = Table.hand_over if self._policy.immediate else Table.snapshot
            frames = tuple(give(self.tables[index], rank) for index in whole)
            message = Values(tables=tuple(whole), versions=tuple(self.tables[index].version for index in whole))
            effects.append(Send((peer,), message, frames))
        return effects

    def _values(self, peer: int, message: Values, frames: tuple[bytes, ...]) -> list[Effect]:
        if self._ranks[peer] != 0 or self._initialised:
            raise ProtocolError("only worker 0 sends initial values, and only once")
        if message.tables != tuple(range(len(self.tables))) or len(frames) != len(self.tables):
            raise ProtocolError(f"initial values came for {len(frames)} of {len(self.tables)} tables")
        for table, frame in zip(self.tables, frames, strict=True):
            table.assign(frame, 0)
        self._initialised = True
        others = tuple(other for other in self._ranks if other != peer)
        down = Values(tables=message.tables, versions=(0,) * len(frames))
        return [Send(others, down, frames)] if others else []

    def _push(self, peer: int, push: Push, frames: tuple[bytes, ...]) -> list[Effect]:
        if not self._initialised:
            raise ProtocolError("a gradient came before the initial values")
        if len(push.tables) != len(frames):
            raise ProtocolError(f"{len(push.tables)} tables and {len(frames)} frames in one push")
        rank = self._ranks[peer]
        self._hear(rank, push)
        ready: list[int] = []
        relayed: list[tuple[int, bytes]] = []
        for index, frame in zip(push.tables, frames, strict=True):
            table = self._table(index)
            if table.spec.state:
                relayed.append((index, self._relay(rank, table, push.step, frame)))
            elif self._policy.immediate:
                table.add(rank, frame, table.incoming.clock)
                ready.append(index)
            elif not self._seen(rank, table, push.step):
                table.add(rank, frame, push.step)
                if self._speaks_of_rates(rank):
                    # An update goes by the rates of its own clock, whoever is ahead of it or late for it.
                    self._rates.setdefault(push.step, push.rates)
                if table.incoming.complete:
                    ready.append(index)
                elif reason := self._hopeless(table):
                    return self._fail(reason)
        self.counters.add("payload_frames_push", len(frames))
        effects = self._relayed(push.step + 1, relayed)
        if self._policy.immediate:
            return effects + self._answer(peer, rank, ready, push.rates)
        while ready:
            effects += self._update(ready)
            # Gradients of the next clock may have been waiting already.
            ready = [index for index in ready if self.tables[index].incoming.complete]
        self._forget_rates()
        return effects

    def _hear(self, rank: int, push: Push) -> None:
        """The learning rates, worker 0's word on the end, and the digests."""
        assert self.plan is not None
        if self._speaks_of_rates(rank) and len(push.rates) != len(self.plan.groups):
            raise ProtocolError(f"{len(push.rates)} learning rates came for {len(self.plan.groups)} groups")
        if rank == 0 and push.last and self._final is None:
            # Where updates are made without worker 0, they may be ahead of it.
            clocks = [table.incoming.clock for table in self.tables if not table.spec.state]
            self._final = max(push.step, *clocks, 0) + 1
        if push.digest:
            self._digests.add(rank, push.step, push.digest)

    def _forget_rates(self) -> None:
        while len(self._rates) > 1 and (oldest := min(self._rates)) < self.step:
            del self._rates[oldest]

    def _speaks_of_rates(self, rank: int) -> bool:
        """Worker 0 does; anybody, where updates are made without it."""
        return rank == 0 or self._policy.immediate or self._policy.quorum(self._workers) < self._workers

    def _seen(self, rank: int, table: Table, clock: int) -> bool:
        """Whether this gradient is to be passed over: taken already, or too late for a policy that allows that."""
        name, current = table.spec.name, table.incoming.clock
        taken = table.incoming.has(rank, clock)
        if rank in self._came_back and (clock < current or taken):
            return True  # a worker that came back repeats its step
        if clock < current and self._policy.quorum(self._workers) < self._workers:
            return True  # the update that was made without it says so
        if not current <= clock <= current + self._policy.lead():
            raise ProtocolError(f"a gradient of step {clock} came for {name!r}, which is at step {current}")
        if taken:
            raise ProtocolError(f"{name!r} got two gradients for step {clock}")
        return False

    def _relay(self, rank: int, table: Table, step: int, frame: bytes) -> bytes:
        if rank != 0:
            raise ProtocolError(f"buffer {table.spec.name!r} comes from worker 0 alone")
        newest = max((other.version for other in self.tables if not other.spec.state), default=MAX_STEP)
        if not table.version <= step <= newest + self._policy.lead() and not self._policy.immediate:
            raise ProtocolError(f"buffer {table.spec.name!r} of step {step} came between {table.version} and {newest}")
        table.assign(frame, step + 1)
        return frame

    def _relayed(self, version: int, relayed: list[tuple[int, bytes]]) -> list[Effect]:
        """Buffers go to everybody as they came."""
        if not relayed:
            return []
        delta = Delta(version=version, tables=tuple(index for index, _ in relayed))
        return [Send(tuple(self._ranks), delta, tuple(frame for _, frame in relayed))]

    def _aggregate(
        self, ready: list[int], rates: tuple[float, ...]
    ) -> list[tuple[int, FloatArray | None, tuple[int, ...]]]:
        """Ends the current clock of some tables, and updates the model where that is the server's to do."""
        assert self.plan is not None and self._updater is not None
        taken = [(index, *self.tables[index].incoming.take(self.plan.reduce)) for index in ready]
        if self.plan.downlink == "delta":
            changed = [(self.tables[index], gradient) for index, gradient, _ in taken if gradient is not None]
            self._updater.set_rates(rates)
            self._updater.step([t.values for t, _ in changed], [torch.from_numpy(g) for _, g in changed])
        return taken

    def _update(self, ready: list[int]) -> list[Effect]:
        """One update of each of these tables for everybody; tables that took the same turn share a message."""
        assert self.plan is not None
        messages: dict[tuple[int, tuple[int, ...]], list[tuple[int, bytes]]] = {}
        rates = self._rates[self.tables[ready[0]].incoming.clock]
        for index, gradient, ranks in self._aggregate(ready, rates):
            table = self.tables[index]
            [(_, frame)] = table.publish(gradient)
            some = ranks if ranks != tuple(range(self._workers)) else ()
            messages.setdefault((table.version, some), []).append((index, frame))
        everybody = tuple(self._ranks)
        effects: list[Effect] = []
        for (version, some), sent in messages.items():
            # The forward pass needs the first tables first.
            sent.sort()
            delta = Delta(
                version=version,
                tables=tuple(index for index, _ in sent),
                last=self._final is not None and version >= self._final,
                ranks=some,
                rates=() if self.plan.downlink == "delta" else rates,
            )
            effects.append(Send(everybody, delta, tuple(frame for _, frame in sent)))
        return effects

    def _answer(self, peer: int, rank: int, ready: list[int], rates: tuple[float, ...]) -> list[Effect]:
        """One update of each of these tables, and its sender's own way to the new version."""
        bases = {index: self.tables[index].given[rank] for index in ready}
        messages: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        for index, gradient, _ in self._aggregate(ready, rates):
            table = self.tables[index]
            [(_, frame)] = table.publish(gradient, {rank})
            messages.setdefault((table.version, bases[index]), []).append((index, frame))
        effects: list[Effect] = []
        for (version, base), sent in messages.items():
            delta = Delta(
                version=version,
                base=base,
                tables=tuple(index for index, _ in sent),
                last=self._final is not None,
                ranks=(rank,),
            )
            effects.append(Send((peer,), delta, tuple(frame for _, frame in sent)))
        return effects

    def _scalars(self, peer: int, message: Scalars) -> list[Effect]:
        """The largest of every worker's scalars, once they are all in (TernGrad §3.1, scalar sharing)."""
        if len(message.values) != len(self.tables):
            raise ProtocolError(f"{len(message.values)} scalars came for {len(self.tables)} tables")
        largest = self._maxima.add(self._ranks[peer], message.step, message.values, self._workers)
        if largest is None:
            return []
        return [Send(tuple(self._ranks), Scalars(step=message.step, values=largest))]

    def _leave(self, peer: int) -> list[Effect]:
        assert self.plan is not None
        self._left.add(self._ranks.pop(peer))
        self.finished = len(self._left) == self.plan.workers
        if not (self._initialised or self.finished):
            return [Close(peer), *self._fail("a worker left before the training had begun")]
        for table in self.tables:
            if not self._policy.immediate and table.incoming.started and (reason := self._hopeless(table)):
                return [Close(peer), *self._fail(reason)]
        return [Close(peer)]

    def _hopeless(self, table: Table) -> str | None:
        """A step that a worker which has left took no part in is never complete: better said than waited for."""
        present = self._workers - len([rank for rank in self._left if not table.incoming.has(rank)])
        if present >= self._policy.quorum(self._workers):
            return None
        for rank in self._left:
            if not table.incoming.has(rank):
                return (
                    f"worker {rank} has left before step {table.version}, with which the others go on; "
                    "all workers must take the same number of steps"
                )
        return None

    # ---- helpers

    def _table(self, index: int) -> Table:
        if not 0 <= index < len(self.tables):
            raise ProtocolError(f"table {index}; there are {len(self.tables)}")
        return self.tables[index]

    def _fail(self, reason: str) -> list[Effect]:
        self._failed = reason
        return [Close(peer, _refused(reason)) for peer in self._ranks]

    @property
    def _workers(self) -> int:
        assert self.plan is not None
        return self.plan.workers

    @property
    def step(self) -> int:
        """Updates that every parameter has had. Buffers, which travel more rarely, do not count."""
        return min((table.version for table in self.tables if not table.spec.state), default=0)

    @property
    def failed(self) -> str | None:
        """Why the training ended early, or None."""
        return self._failed


def _refused(reason: str) -> Refused:
    return Refused(reason=reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} …")
