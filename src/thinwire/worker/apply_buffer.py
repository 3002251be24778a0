"""The apply buffer: updates of one shard's tables, from when they come until the model needs them. Sans-IO."""

from __future__ import annotations

from collections import deque

import msgspec

from thinwire.errors import ProtocolError
from thinwire.optimizers.outer_momentum import Part
from thinwire.packets import EncodedTensor
from thinwire.schema import Changes, Plan


class Update(msgspec.Struct, frozen=True):  # which is made faster than a dataclass, once for every table and step
    """One step of a table.

    Args:
        version: that the table has afterwards.
        frame: what leads there; empty changes nothing.
        whole: the frame holds values that replace the copy, not something to add or to step by.
        missed: this worker pushed a gradient that came too late for the update.
        rates, options, ranks, base: as in the shard's `Delta`.
        merged: of learners that never wait: the inner steps of this learner's newest contribution in it; -1: none is.
        momentum: as in the shard's `Merged`.
        ahead: of whole values, what came in two `Ahead`: the anchor, and how far ahead; else nothing.
    """

    version: int
    frame: EncodedTensor
    whole: bool
    missed: bool = False
    rates: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    options: Changes = ()
    base: int = -1
    merged: int = -1
    momentum: Part = ()
    ahead: tuple[EncodedTensor, ...] = ()


class ApplyBuffer:
    """Updates that have come and are not applied.

    Args:
        plan: of the shard.
        rank: the worker's.
        immediate: whether every push is an update by itself, so that versions jump.

    Attributes:
        versions: of the worker's copy, per table; −1 before the initial values.
        answered: how many updates each table has had.
    """

    def __init__(self, plan: Plan, rank: int, *, immediate: bool) -> None:
        self.versions = [-1] * len(plan.tables)
        self.answered = [0] * len(plan.tables)
        self._plan, self._rank, self._immediate = plan, rank, immediate
        self._pushed_at = [-1] * len(plan.tables)
        self._waiting: list[deque[Update]] = [deque() for _ in plan.tables]

    def check(self, tables: tuple[int, ...], frames: tuple[EncodedTensor, ...]) -> None:
        """Raises ProtocolError where a message's tables are not the plan's, or not as many as its frames."""
        if len(tables) != len(frames):
            raise ProtocolError(f"{len(tables)} tables and {len(frames)} frames in one message")
        if any(not 0 <= table < len(self._waiting) for table in tables):
            raise ProtocolError(f"tables {tables}; there are {len(self._waiting)}")

    def pushed(self, table: int, clock: int) -> None:
        """Notes that this worker has pushed a gradient of a table at a clock."""
        self._pushed_at[table] = clock

    def add(self, table: int, update: Update) -> None:
        """Takes an update that leads on from the one before."""
        self._waiting[table].append(update)

    def replace(self, table: int, update: Update) -> None:
        """Takes an update of whole values in place of all that wait."""
        self._waiting[table].clear()
        self.add(table, update)

    def take(self, table: int, clock: int) -> list[Update]:
        """Removes and returns the updates of a table that have come, up to the clock, oldest first.

        Raises:
            ProtocolError: a version is missing in between.
        """
        waiting, taken = self._waiting[table], []
        while waiting and (waiting[0].version <= clock or self._immediate or self.versions[table] < 0):
            update = waiting.popleft()
            base = update.base if update.base >= 0 else update.version - 1
            if not update.whole and base != self.versions[table]:
                raise ProtocolError(
                    f"{self._plan.tables[table].name!r}: version {update.version} came after {self.versions[table]}"
                )
            self.versions[table] = update.version
            self.answered[table] += not update.whole
            # Whether our gradient came too late for it; the update may have come before we pushed.
            late = update.ranks and self._rank not in update.ranks and self._pushed_at[table] == update.version - 1
            taken.append(msgspec.structs.replace(update, missed=True) if late else update)
        return taken

    def reached(self) -> int | None:
        """The newest version of which every parameter's update is here, applied or not; None without parameters."""
        versions = [
            self._waiting[table][-1].version if self._waiting[table] else self.versions[table]
            for table, spec in enumerate(self._plan.tables)
            if not spec.state
        ]
        return min(versions, default=None)
