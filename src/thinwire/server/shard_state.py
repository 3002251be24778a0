"""The state of one shard: its tables, where each worker is, and how messages reach the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from thinwire.errors import ConfigError
from thinwire.packets import EncodedTensor
from thinwire.quantities import moment_text, plain_text
from thinwire.schema import Members, Offer, Plan, Resume, Values
from thinwire.server.effects import Close, Effect, Send, Tell, refused
from thinwire.server.rounds import Digests, Maxima
from thinwire.server.table import Table
from thinwire.server.update_engine import UpdateEngine
from thinwire.server.updates import Outgoing


class Presence(Enum):
    """Where the worker of a rank is."""

    EXPECTED = auto()
    """It has not come since this process began."""
    JOINED = auto()
    """It has said which states it holds, and not yet from where it continues."""
    TRAINING = auto()
    """It trains."""
    RETURNING = auto()
    """It has left to join again."""
    LEFT = auto()
    """It has left in good order, at the training's end."""
    LOST = auto()
    """It was dropped, and may join again."""


@dataclass(slots=True)
class Peer:
    """A session of a worker that has joined.

    Args:
        rank: of the worker.
        steps: of which it holds states.
        interrupted: its connection is broken.
        offer: the newest one that it was sent.
        choice: from where it continues, of that offer.
    """

    rank: int
    steps: tuple[int, ...]
    interrupted: bool = False
    offer: Offer | None = None
    choice: Resume | None = None


class ShardState:
    """The workers of one shard, by peer and rank, and its tables.

    Args:
        min_workers: as for `ServerCore`.

    Attributes:
        finished, checkpoints: as of `ServerCore`.
        now: returns a time in seconds; grace windows are measured by it.
    """

    def __init__(self, min_workers: int | None) -> None:
        if min_workers is not None and min_workers < 1:
            raise ConfigError(f"min_workers is {min_workers}; at least 1 is needed")
        self.finished = False
        self.checkpoints: Mapping[int, Mapping[str, Any]] = {}
        self.now: Callable[[], float] = float
        self._min_workers = min_workers
        self._failed: str | None = None
        self._stopped = False
        """Whether the server was stopped; that is in `_failed`, too."""
        self._forget_plan()

    def _time(self) -> float:
        return self.now()

    def _forget_plan(self) -> None:
        """Becomes a shard at which no worker has been."""
        self._engine: UpdateEngine | None = None
        self._presence: dict[int, Presence] = {}
        self._peers: dict[int, Peer] = {}
        self._initial: list[tuple[Values, tuple[EncodedTensor, ...]]] = []
        """What worker 0 has sent of the initial values, until it has sent all of them."""
        self._initialised = self._progressed = self._began = self._trained = False
        """Whether the tables have values; have changed since this shard began or went back; whether all workers have
        come; whether a gradient has ever come, or a state was loaded. Until then the shard may forget the plan."""
        self._maxima, self._digests = Maxima(), Digests()

    # ---- where the training is

    @property
    def plan(self) -> Plan | None:
        """The first worker's plan; None before."""
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
    def steps_each(self) -> int:
        """How many steps workers take from the newest of these updates to the next; 1 before there is a plan."""
        return 1 if self._engine is None else self._engine.steps_from(self.step)

    @property
    def moment(self) -> str:
        """`step` as text: an exchange is not called a step where one exchange comes in several steps."""
        return moment_text(self.step, self.steps_each)

    @property
    def is_even(self) -> bool:
        """Whether a state can be taken: every parameter has had as many updates, or all are counted one by one."""
        engine = self._engine
        return engine is None or not engine.terms.has_common_clock or engine.step == engine.newest

    @property
    def over(self) -> bool:
        """Whether the last update that was announced has been made: nothing is left to train.

        Without a common clock one shard alone cannot tell.
        """
        engine = self._engine
        if engine is None or engine.final is None or not engine.terms.has_common_clock:
            return False
        return engine.step >= engine.final

    @property
    def begun(self) -> bool:
        """Whether all workers have come once."""
        return self._began

    @property
    def failed(self) -> str | None:
        """Why the training ended early, or None."""
        return self._failed

    # ---- where the workers are

    @property
    def missing(self) -> tuple[int, ...]:
        """Workers that have not left in good order: they are here, they died, or they never came."""
        if self._engine is None:
            return ()
        known = {*range(self._engine.plan.workers), *self._presence}
        return tuple(sorted(known.difference(self.left)))

    @property
    def sessions(self) -> dict[int, int]:
        """The number of each worker's session, of those that have joined and not gone."""
        return {each.rank: peer for peer, each in self._peers.copy().items()}

    @property
    def here(self) -> tuple[int, ...]:
        """Workers that have joined and not gone, sorted."""
        return tuple(sorted(self.sessions))

    @property
    def interrupted_ranks(self) -> tuple[int, ...]:
        """Workers of `here` with a broken connection, which may return, sorted."""
        return tuple(sorted(each.rank for each in self._peers.copy().values() if each.interrupted))

    @property
    def left(self) -> tuple[int, ...]:
        """Workers that have left in good order, at the training's end, sorted."""
        return tuple(sorted(self._ranks_that_are(Presence.LEFT)))

    def _ranks_that_are(self, *presences: Presence) -> set[int]:
        return {rank for rank, presence in self._presence.copy().items() if presence in presences}

    def _training_peers(self) -> list[int]:
        return [peer for peer, each in self._peers.items() if self._presence[each.rank] is Presence.TRAINING]

    @property
    def _least(self) -> int:
        """With fewer workers no update is made."""
        return 1 if self._engine is None else self._engine.members.least

    # ---- what is said to all

    def _address(self, outgoing: Sequence[Outgoing]) -> list[Effect]:
        """Ranks become the peers that hold them."""
        if not outgoing:
            return []
        ring = sorted((self._peers[peer].rank, peer) for peer in self._training_peers())
        effects: list[Effect] = []
        for each in outgoing:
            peers = tuple(peer for rank, peer in ring if each.rank in (None, rank))
            effects.append(Send(peers, each.message, each.frames))
        return effects

    def _fail(self, reason: str) -> list[Effect]:
        """Ends the training for the workers that are here. Before its first gradient the shard waits for another."""
        effects: list[Effect] = [Close(peer, refused(reason), told=True) for peer in self._peers]
        if self._trained:
            self._failed = plain_text(reason)
        else:
            self._forget_plan()
            effects.append(Tell(f"{plain_text(reason)}; no gradient had come, and the server waits for others"))
        return effects

    def _tell(self, reason: str, *, but: int | None = None, interrupted: bool = False) -> list[Effect]:
        """Sends all workers, or all but one, the members from now on."""
        assert self._engine is not None
        members = Members(
            step=self.step,
            ranks=self._engine.members.ranks,
            least=self._least,
            reason=plain_text(reason),
            interrupted=interrupted,
            since=-1 if interrupted else self._engine.members.since,
        )
        peers = tuple(peer for peer in self._training_peers() if peer != but)
        return [Send(peers, members)] if peers else []
