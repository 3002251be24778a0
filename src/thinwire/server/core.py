"""The parameter server as a pure state machine: (peer, message, frames) in, effects out.

It owns no socket, thread or clock. This file holds the conversation: who is there, who may say what, and what is
sent when somebody breaks it, and what all workers say once a step: scales to share, digests to compare. The updates
themselves are in `update_engine.py`, the plan's checks in `agreement.py`.

A peer that breaks the conversation is refused with the reason and closed. So is one that goes away dropped: with enough
others the training goes on, or waits for more; else it ends, and they are told why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from thinwire.errors import ConfigError, FrameError, NonFiniteError, ProtocolError
from thinwire.packets import EncodedTensor
from thinwire.schema import Join, Leave, Members, Message, Plan, Push, Refused, Scalars, Values, Welcome
from thinwire.server.agreement import check_plan, check_version, difference
from thinwire.server.rounds import Digests, Maxima
from thinwire.server.table import Table
from thinwire.server.update_engine import Outgoing, StepUnreachable, UpdateEngine

MAX_REASON = 2000
"""Characters. A reason may quote what a peer sent, and the answer to a large message must not be larger still."""
MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to some peers."""

    peers: tuple[int, ...]
    message: Message
    frames: tuple[EncodedTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """End a peer's session, after a last message."""

    peer: int
    message: Message | None = None


Effect = Send | Close
"""What a shard wants done: a plain value, for others to carry out."""


class ServerCore:
    """One shard.

    Args:
        min_workers: the training goes on without workers that died, and with others that join, while so many are left;
            with fewer it waits. None: it goes on while the consistency policy has enough gradients, and else ends.

    Raises:
        ConfigError: `min_workers` is below 1.
    """

    def __init__(self, min_workers: int | None = None) -> None:
        if min_workers is not None and min_workers < 1:
            raise ConfigError(f"min_workers is {min_workers}; at least 1 is needed")
        self.finished = False
        self._min_workers = min_workers
        self._engine: UpdateEngine | None = None
        self._ranks: dict[int, int] = {}
        self._left: set[int] = set()
        self._interrupted: set[int] = set()
        self._initialised = False
        self._failed: str | None = None
        self._maxima = Maxima()
        self._digests = Digests()

    # ---- events

    def received(self, peer: int, message: Message, frames: tuple[EncodedTensor, ...] = ()) -> list[Effect]:
        """Takes one message of a peer and returns what to do."""
        if self._failed is not None:
            return [Close(peer, refused(self._failed))]
        try:
            return self._dispatch(peer, message, frames)
        except StepUnreachable as unreachable:
            return self._fail(str(unreachable))
        except (ProtocolError, ConfigError) as error:
            return self.broke(peer, str(error))
        except FrameError as error:  # a gradient may have waited for its turn: the text says whose it is
            return self._fail(str(error))
        except NonFiniteError as error:
            return self._fail(f"the training has diverged: {error}. Use a smaller learning rate or sparsity")

    def broke(self, peer: int, reason: str) -> list[Effect]:
        """A peer said what the conversation does not allow: it is refused, and the others hear why."""
        rank = self._ranks.get(peer)
        if rank is None or self._failed is not None:
            return [Close(peer, refused(reason))]
        if self._min_workers is None or not self._initialised:
            return self._fail(f"worker {rank}: {reason}")
        del self._ranks[peer]
        return [Close(peer, refused(f"worker {rank}: {reason}")), *self._drop(rank, f"worker {rank}: {reason}")]

    def interrupted(self, peer: int) -> list[Effect]:
        """A peer's connection broke, and its session waits: another process may now take its rank."""
        rank = self._ranks.get(peer)
        if rank is None:
            return []
        self._interrupted.add(peer)
        if self._min_workers is None:
            return []
        return self._tell(f"worker {rank} lost its connection at step {self.step}", but=peer, interrupted=True)

    def resumed(self, peer: int) -> None:
        """An interrupted peer is back."""
        self._interrupted.discard(peer)

    def closed(self, peer: int, error: str | None) -> list[Effect]:
        """A session is over. In the middle of training its worker is dropped, or the training ends for all."""
        self._interrupted.discard(peer)
        rank = self._ranks.pop(peer, None)
        if rank is None or self._failed is not None:
            return []
        reason = f"worker {rank} went away at step {self.step}: {error or 'it closed its session'}"
        too_few = self._min_workers is None and len(self._ranks) < self._least
        if not self._initialised or too_few or (self._left and not self._ranks):
            return self._fail(reason)
        return self._drop(rank, reason)

    # ---- the conversation

    def _dispatch(self, peer: int, message: Message, frames: tuple[EncodedTensor, ...]) -> list[Effect]:
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
        if peer in self._ranks:
            raise ProtocolError("a second Join in one session")
        check_version(join.version)
        if self.plan is None:
            check_plan(join.plan)
        elif reason := difference(self.plan, join.plan):
            raise ProtocolError(reason)
        highest = join.plan.workers if self._min_workers is None else MAX_WORKERS
        if not 0 <= join.rank < highest:
            more = "; with --min-workers the server takes more" if self._min_workers is None else ""
            raise ProtocolError(f"rank {join.rank}; this training has ranks 0 … {highest - 1}{more}")
        if self._engine is None:
            self._engine = UpdateEngine(join.plan, self._min_workers)
            # A shard may hold nothing, where there are more of them than tables: then nobody has values to send.
            self._initialised = not self._engine.tables
        holder = next((other for other, rank in self._ranks.items() if rank == join.rank), None)
        if holder is not None and holder not in self._interrupted:
            raise ProtocolError(f"rank {join.rank} is taken: every worker needs a rank of its own")
        if join.rank in self._left and self._min_workers is None:
            raise ProtocolError(f"worker {join.rank} has left this training, and it does not begin again")
        if self._initialised:
            self._engine.check_versions(join.rank, join.have)  # before anybody is replaced
        effects = [] if holder is None else self._replace(holder, join.rank)
        begin = -1 if join.rank in self._engine.members.ranks else self._engine.admit(join.rank)
        values = self._engine.catch_up(join.rank, join.have) if self._initialised else []
        self._left.discard(join.rank)
        self._engine.begin(join.rank)
        self._ranks[peer] = join.rank
        ask = join.rank == 0 and not self._initialised
        final = self._engine.final
        history = self._engine.members.history
        welcome = Welcome(
            send_values=ask,
            step=self.step,
            final=-1 if final is None else final,
            begin=begin,
            elastic=self._min_workers is not None,
            memberships=history if len(history) > 1 or history[0][0] else (),
        )
        effects += [Send((peer,), welcome), *self._address(values)]
        if begin >= 0:
            # The others hear of it before the next update, for it says from when on they divide the data otherwise.
            effects += self._tell(f"worker {join.rank} is here from step {begin} on", but=peer)
            effects += self._address(self._engine.go_on())  # where it was one too few that the others waited for
        return effects

    def _replace(self, holder: int, rank: int) -> list[Effect]:
        """Another process takes the rank of a worker whose connection is broken."""
        del self._ranks[holder]
        self._interrupted.discard(holder)
        over = Close(holder, refused(f"another process has taken rank {rank}, while this one was not connected"))
        if not self._initialised:
            return [over]
        return [over, *self._drop(rank, f"worker {rank} was not connected at step {self.step}, and is replaced")]

    def _drop(self, rank: int, reason: str) -> list[Effect]:
        """Goes on without a worker, or waits for others, and tells those who are left."""
        assert self._engine is not None
        self._maxima.drop(rank)
        self._digests.drop(rank)
        effects = self._address(self._engine.drop(rank))
        effects += [
            effect
            for step, largest in self._maxima.completed(self._engine.members.ranks)
            for effect in self._address([Outgoing(Scalars(step=step, values=largest))])
        ]
        return [*effects, *self._tell(reason)]

    def _tell(self, reason: str, *, but: int | None = None, interrupted: bool = False) -> list[Effect]:
        """Says to all workers, or all but one, who takes part from now on."""
        assert self._engine is not None
        members = Members(
            step=self.step,
            ranks=self._engine.members.ranks,
            least=self._least,
            reason=refused(reason).reason,
            interrupted=interrupted,
            since=-1 if interrupted else self._engine.members.since,
        )
        peers = tuple(peer for peer in self._ranks if peer != but)
        return [Send(peers, members)] if peers else []

    @property
    def _least(self) -> int:
        """With fewer workers no update is made."""
        return 1 if self._engine is None else self._engine.members.least

    def _values(self, peer: int, message: Values, frames: tuple[EncodedTensor, ...]) -> list[Effect]:
        assert self._engine is not None
        if self._ranks[peer] != 0 or self._initialised:
            raise ProtocolError("only worker 0 sends initial values, and only once")
        self._engine.assign(message, frames)
        self._initialised = True
        others = tuple(other for other in self._ranks if other != peer)
        down = Values(tables=message.tables, versions=(0,) * len(frames))
        return [Send(others, down, frames)] if others else []

    def _push(self, peer: int, push: Push, frames: tuple[EncodedTensor, ...]) -> list[Effect]:
        assert self._engine is not None
        if not self._initialised:
            raise ProtocolError("a gradient came before the initial values")
        rank = self._ranks[peer]
        if push.digest:
            self._digests.add(rank, push.step, push.digest)
        return self._address(self._engine.push(rank, push, frames, left=self._left))

    def _scalars(self, peer: int, message: Scalars) -> list[Effect]:
        """The largest of every worker's scalars, once they are all in (TernGrad §3.1, scalar sharing)."""
        assert self._engine is not None
        if len(message.values) != len(self.tables):
            raise ProtocolError(f"{len(message.values)} scalars came for {len(self.tables)} tables")
        ranks = self._engine.members.ranks
        largest = self._maxima.add(self._ranks[peer], message.step, message.values, ranks)
        if largest is None:
            return []
        return self._address([Outgoing(Scalars(step=message.step, values=largest))])

    def _leave(self, peer: int) -> list[Effect]:
        assert self._engine is not None
        rank = self._ranks.pop(peer)
        self._left.add(rank)
        self.finished = not self._ranks and self._left >= set(self._engine.members.ranks)
        if not (self._initialised or self.finished):
            return [Close(peer), *self._fail("a worker left before the training had begun")]
        if self._min_workers is not None:
            # No word of it for people: at the end everybody leaves.
            return [Close(peer), *self._drop(rank, "")]
        if reason := self._engine.unreachable(self._left):
            return [Close(peer), *self._fail(reason)]
        return [Close(peer)]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that another process needs to go on from here: plain values, arrays and tensors.

        Raises:
            ConfigError: there is no training yet, it has failed, or tables have different versions.
        """
        if self._engine is None or not self._initialised or self._failed is not None:
            raise ConfigError(f"this shard has nothing to keep: {self._failed or 'the training has not begun'}")
        return {"plan": msgspec.to_builtins(self._engine.plan), "steps": self._engine.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; workers then join at that step, with the same plan.

        Raises:
            ConfigError: the state is not one of a shard, or this one has begun already.
        """
        if self._engine is not None:
            raise ConfigError("this shard has begun a training; a state is loaded before anybody joins")
        try:
            plan = msgspec.convert(state["plan"], Plan)
            check_plan(plan)
            engine = UpdateEngine(plan, self._min_workers)
            engine.load_state_dict(state["steps"])
        except (ProtocolError, msgspec.ValidationError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"the state is not one of a shard: {type(error).__name__}: {error}") from error
        self._engine, self._initialised = engine, True

    # ---- helpers

    def _address(self, outgoing: Sequence[Outgoing]) -> list[Effect]:
        """Ranks become the peers that hold them."""
        effects: list[Effect] = []
        for each in outgoing:
            peers = tuple(peer for peer, rank in self._ranks.items() if each.rank in (None, rank))
            effects.append(Send(peers, each.message, each.frames))
        return effects

    def _fail(self, reason: str) -> list[Effect]:
        self._failed = reason
        return [Close(peer, refused(reason)) for peer in self._ranks]

    @property
    def plan(self) -> Plan | None:
        """What the first worker brought; None before."""
        return None if self._engine is None else self._engine.plan

    @property
    def tables(self) -> list[Table]:
        """The plan's tables; none before there is a plan."""
        return [] if self._engine is None else self._engine.tables

    @property
    def step(self) -> int:
        """Updates that every parameter has had. Buffers, which travel more rarely, do not count."""
        return 0 if self._engine is None else self._engine.step

    @property
    def failed(self) -> str | None:
        """Why the training ended early, or None."""
        return self._failed


def refused(reason: str) -> Refused:
    """Returns the last message to a peer, no longer than it needs to be.

    >>> len(refused("x" * 9000).reason)
    2002
    """
    return Refused(reason=reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} …")
