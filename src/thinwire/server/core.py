"""The parameter server as a pure state machine: (peer, message, frames) in, effects out.

It owns no socket, thread or clock. This file holds the conversation: which messages a worker may send, the answer to
a breach, and the scales and digests that all workers send once a step. Members are in `shard_membership.py`, the
updates in `update_engine.py`, the plan's checks in `agreement.py`.

A peer that breaks the conversation is refused with the reason and closed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from thinwire.errors import ConfigError, FrameError, NonFiniteError, ProtocolError
from thinwire.packets import EncodedTensor
from thinwire.schema import Contribution, Join, Leave, Message, Push, Refused, Resume, Scalars, Values
from thinwire.server.effects import Close, Effect, Send, refused
from thinwire.server.merge_engine import MergeEngine
from thinwire.server.ranges import check_range
from thinwire.server.shard_membership import ShardMembership
from thinwire.server.shard_state import Presence
from thinwire.server.state import engine_of, state_of
from thinwire.server.updates import CannotGoOn, Outgoing


class ServerCore(ShardMembership):
    """One shard.

    Args:
        min_workers: the training goes on without workers that died, and with others that join, while so many are left;
            with fewer it waits. None: it goes on while the consistency policy has enough gradients, and else ends.

    Attributes:
        finished: whether every worker has left in good order.
        checkpoints: states of before that it can go back to, by step, as from `state_dict`; that of step 0, the
            beginning, is not looked at.

    Raises:
        ConfigError: `min_workers` is below 1.
    """

    def __init__(self, min_workers: int | None = None) -> None:
        super().__init__(min_workers)

    # ---- events

    def received(self, peer: int, message: Message, frames: tuple[EncodedTensor, ...] = ()) -> list[Effect]:
        """Takes one message of a peer and returns what to do."""
        if self._failed is not None:
            return [Close(peer, Refused(reason=self._failed, stopped=self._stopped))]

        def taken() -> list[Effect]:
            try:
                return self._dispatch(peer, message, frames)
            except (ProtocolError, ConfigError) as error:
                return self._broke(peer, str(error))

        return self._ending(taken)

    def closed(self, peer: int, error: str | None) -> list[Effect]:
        return self._ending(lambda: super(ServerCore, self).closed(peer, error))

    def overdue(self, ranks: Collection[int]) -> list[Effect]:
        return self._ending(lambda: super(ServerCore, self).overdue(ranks))

    @property
    def merges_at(self) -> float | None:
        """When `merge_due` is to be called, by the time of `now`; None: not before another event."""
        return self._engine.merges_at if isinstance(self._engine, MergeEngine) and self._failed is None else None

    def merge_due(self) -> list[Effect]:
        """The time has come to merge what learners have contributed."""
        engine = self._engine
        return [] if engine is None or self._failed is not None else self._ending(lambda: self._address(engine.go_on()))

    def broke(self, peer: int, reason: str) -> list[Effect]:
        """Refuses a peer that broke the conversation, and names the reason to the other workers."""
        return self._ending(lambda: self._broke(peer, reason))

    def _ending(self, event: Callable[[], list[Effect]]) -> list[Effect]:
        """Returns what an event leads to. Where it makes an update that cannot be made, the training ends for all."""
        try:
            effects = event()
        except CannotGoOn as error:
            effects = self._fail(str(error))
        except FrameError as error:  # a gradient may have waited for its turn: the text says whose it is
            effects = self._fail(str(error))
        except NonFiniteError as error:
            effects = self._fail(f"the training has diverged: {error}. Use a smaller learning rate or sparsity")
        if not self._trained and not (self._peers or self.left or self._failed):
            self._forget_plan()
        return effects

    def _broke(self, peer: int, reason: str) -> list[Effect]:
        if peer not in self._peers or self._failed is not None:
            return [Close(peer, refused(reason))]
        if self._presence[rank := self._peers[peer].rank] is Presence.JOINED:
            self._forget(peer)
            return [Close(peer, refused(reason)), *self._gone(rank, reason)]
        told = f"worker {rank}: {reason}"
        if self._min_workers is None or not self._initialised:
            return self._fail(told)
        self._forget(peer)
        self._presence[rank] = Presence.LOST
        return [Close(peer, refused(told)), *self._drop(rank, told), *self._gather()]

    def end(self, reason: str) -> list[Effect]:
        """Ends the training early, as the server is stopped; where no worker is here, nothing happens.

        Args:
            reason: who or what stopped the server, and when, in words for the workers.
        """
        if self._failed is not None or not self._peers:
            return []
        self._failed, self._stopped = reason, True
        return [Close(peer, Refused(reason=reason, stopped=True)) for peer in self._peers]

    # ---- the conversation

    def _dispatch(self, peer: int, message: Message, frames: tuple[EncodedTensor, ...]) -> list[Effect]:
        if isinstance(message, Join):
            return self._join(peer, message)
        if peer not in self._peers:
            raise ProtocolError(f"{type(message).__name__} came before Join")
        match message:
            case Resume():
                return self._resume(peer, message)
            case Leave():
                return self._leave(peer, message)
            case Push() | Contribution() | Values() | Scalars() if (
                self._presence[self._peers[peer].rank] is not Presence.TRAINING
            ):
                raise ProtocolError(f"{type(message).__name__} came before Resume")
            case Push():
                return self._push(peer, message, frames)
            case Contribution():
                return self._contribute(peer, message, frames)
            case Values():
                return self._values(peer, message, frames)
            case Scalars():
                return self._scalars(peer, message)
            case _:
                raise ProtocolError(f"a worker does not send {type(message).__name__}")

    def _values(self, peer: int, message: Values, frames: tuple[EncodedTensor, ...]) -> list[Effect]:
        assert self._engine is not None
        if self._peers[peer].rank != 0 or self._initialised:
            raise ProtocolError("only worker 0 sends initial values, and only once")
        if message.tables[:1] == (0,):
            self._initial = []  # another process of this rank begins anew
        taken = sum(len(each.tables) for each, _ in self._initial)
        self._engine.assign(taken, message, frames)
        self._initial.append((Values(tables=message.tables, versions=(0,) * len(frames)), frames))
        if taken + len(frames) < len(self._engine.tables):
            return []
        # Sent when all are there: a worker that joins in between would get some of them, and never the others.
        initial, self._initial, self._initialised = self._initial, [], True
        others = tuple(other for other in self._training_peers() if other != peer)
        return [Send(others, down, part) for down, part in initial] if others else []

    def _push(self, peer: int, push: Push, frames: tuple[EncodedTensor, ...]) -> list[Effect]:
        assert self._engine is not None
        if not self._initialised:
            raise ProtocolError("a gradient came before the initial values")
        if isinstance(self._engine, MergeEngine):
            raise ProtocolError(f"a gradient came; with {self._engine.plan.consistency} learners send contributions")
        self._progressed = self._trained = True
        rank = self._peers[peer].rank
        # Without min_workers the training ends with this worker anyway.
        check_range(self.tables, push.tables, frames, decodes=self._min_workers is not None)
        if push.digest:
            self._engine.check_step(push.step)  # the first one that is told is what the others must equal
            self._digests.add(rank, push.step, push.digest)
        return self._address(self._engine.push(rank, push, frames, left=self.left))

    def _contribute(self, peer: int, message: Contribution, frames: tuple[EncodedTensor, ...]) -> list[Effect]:
        if not isinstance(self._engine, MergeEngine):
            raise ProtocolError("a contribution came, and this training's workers send gradients")
        if not self._initialised:
            raise ProtocolError("a contribution came before the initial values")
        check_range(self.tables, message.tables, frames, decodes=self._min_workers is not None)
        made = self._engine.contribute(self._peers[peer].rank, message, frames)
        self._progressed = self._trained = self._began = True
        return self._address(made)

    def _scalars(self, peer: int, message: Scalars) -> list[Effect]:
        """The largest of every worker's scalars, once they are all in (TernGrad §3.1, scalar sharing)."""
        assert self._engine is not None
        if len(message.values) != len(self.tables):
            raise ProtocolError(f"{len(message.values)} scalars came for {len(self.tables)} tables")
        self._engine.check_step(message.step)
        ranks = self._engine.members.expected(message.step)
        largest = self._maxima.add(self._peers[peer].rank, message.step, message.values, ranks)
        if largest is None:
            reason = self._maxima.unreachable(self._engine.members.expected, self.left)
            return [] if reason is None else self._fail(reason)
        return self._address([Outgoing(Scalars(step=message.step, values=largest))])

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that another process needs to go on from here: plain values, arrays and tensors.

        Raises:
            ConfigError: there is no training yet, it has failed, or tables have different versions.
        """
        if self._engine is None or not self._initialised or self._failed is not None:
            raise ConfigError(f"this shard has nothing to keep: {self._failed or 'the training has not begun'}")
        return state_of(self._engine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; workers then join at that step, with the same plan.

        Raises:
            ConfigError: the state is not one of a shard, or this one has begun already.
        """
        if self._engine is not None:
            raise ConfigError("this shard has begun a training; a state is loaded before anybody joins")
        self._engine, self._initialised = engine_of(state, self._min_workers, self._time), True
        self._began = self._trained = True  # before that state was taken
