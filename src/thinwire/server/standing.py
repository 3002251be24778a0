"""Where one shard's training stands, and who is there: what every part of its core looks at, and how all are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.errors import ConfigError
from thinwire.quantities import moment_text
from thinwire.schema import Members, Plan
from thinwire.server.effects import Close, Effect, Send, refused
from thinwire.server.rollback import Rollback
from thinwire.server.rounds import Digests, Maxima
from thinwire.server.saved import SavedSteps
from thinwire.server.table import Table
from thinwire.server.update_engine import UpdateEngine
from thinwire.server.updates import Outgoing


class Standing:
    """The workers of one shard, by peer and rank, and its tables.

    Args:
        min_workers, first: as for `ServerCore`.
        skips_late: whether updates may be made without workers that are late.

    Attributes:
        finished, checkpoints: as of `ServerCore`.
    """

    def __init__(self, min_workers: int | None, *, skips_late: bool, first: int = 0) -> None:
        if min_workers is not None and min_workers < 1:
            raise ConfigError(f"min_workers is {min_workers}; at least 1 is needed")
        self.finished = False
        self.checkpoints: Mapping[int, Mapping[str, Any]] = {}
        self._min_workers, self._skips_late, self._first = min_workers, skips_late, first
        self._engine: UpdateEngine | None = None
        self._ranks: dict[int, int] = {}
        self._left: set[int] = set()
        self._lost: set[int] = set()
        self._interrupted: set[int] = set()
        self._returning: set[int] = set()
        self._away: set[int] = set()
        self._rollback = Rollback()
        self._initialised = self._progressed = self._gathered = False
        self._resumed_at = -1
        self._failed: str | None = None
        self._maxima = Maxima()
        self._digests = Digests()
        self._saved = SavedSteps()

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
    def steps_each(self) -> int:
        """How many steps workers take from the newest of these updates to the next; 1 before there is a plan."""
        return 1 if self._engine is None else self._engine.steps_from(self.step)

    @property
    def moment(self) -> str:
        """`step`, in words that do not call an exchange a step where it is one in several."""
        return moment_text(self.step, self.steps_each)

    @property
    def is_even(self) -> bool:
        """Whether a state can be taken: every parameter has had as many updates, or all are counted one by one."""
        engine = self._engine
        return engine is None or engine.terms.immediate or engine.step == engine.newest

    @property
    def _loses_nothing(self) -> bool:
        """Whether all may go back to where this shard is: nothing has come yet, or no update since it was resumed."""
        return not self._progressed or (self._engine is not None and self._engine.newest == self._resumed_at)

    @property
    def over(self) -> bool:
        """Whether the last update that was announced has been made: nothing is left to train.

        Where every push is an update by itself, nobody can say so of a shard alone.
        """
        engine = self._engine
        if engine is None or engine.final is None or engine.terms.immediate:
            return False
        return engine.step >= engine.final

    @property
    def missing(self) -> tuple[int, ...]:
        """Workers that have not left in good order: they are here, they died, or they never came."""
        if self._engine is None:
            return ()
        return tuple(sorted(({*range(self._engine.plan.workers)} | self._lost | {*self._ranks.values()}) - self._left))

    @property
    def here(self) -> tuple[int, ...]:
        """Workers that have joined and not gone, sorted."""
        return tuple(sorted(self._ranks.values()))

    @property
    def interrupted_ranks(self) -> tuple[int, ...]:
        """Workers of `here` whose connection is broken, and who may come back, sorted."""
        return tuple(sorted(rank for peer, rank in tuple(self._ranks.items()) if peer in self._interrupted))

    @property
    def left(self) -> tuple[int, ...]:
        """Workers that have left in good order, at the training's end, sorted."""
        return tuple(sorted(self._left))

    @property
    def failed(self) -> str | None:
        """Why the training ended early, or None."""
        return self._failed

    @property
    def _here(self) -> set[int]:
        """The ranks whose workers are here, in the training or about to go back."""
        return {*self._ranks.values(), *self._rollback.voters.values()}

    @property
    def _least(self) -> int:
        """With fewer workers no update is made."""
        return 1 if self._engine is None else self._engine.members.least

    # ---- what is said to all

    def _address(self, outgoing: Sequence[Outgoing]) -> list[Effect]:
        """Ranks become the peers that hold them."""
        if not outgoing:
            return []
        ring = sorted((rank < self._first, rank, peer) for peer, rank in self._ranks.items())
        effects: list[Effect] = []
        for each in outgoing:
            peers = tuple(peer for _, rank, peer in ring if each.rank in (None, rank))
            effects.append(Send(peers, each.message, each.frames))
        return effects

    def _fail(self, reason: str) -> list[Effect]:
        self._failed = reason
        return [Close(peer, refused(reason)) for peer in (*self._ranks, *self._rollback.voters)]

    def _tell(
        self, reason: str, *, but: int | None = None, interrupted: bool = False, changed: bool = True
    ) -> list[Effect]:
        """Says to all workers, or all but one, who takes part from now on."""
        assert self._engine is not None
        members = Members(
            step=self.step,
            ranks=self._engine.members.ranks,
            least=self._least,
            reason=refused(reason).reason,
            interrupted=interrupted,
            since=self._engine.members.since if changed and not interrupted else -1,
        )
        peers = tuple(peer for peer in self._ranks if peer != but)
        return [Send(peers, members)] if peers else []
