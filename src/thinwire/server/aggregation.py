"""The gradients that come in of tables that move together: clock by clock, and their aggregates.

Tables of which every worker says as much in each message share one state: one clock, and one note of who has spoken.
What is theirs alone, a frame and a sum, is handled for all of them by few calls (`table_group.py`). Tables part, and
come together again, as messages ask for it (`lanes.py`).

Gradients are decoded and added in the order of the ranks, whatever the order of arrival: floating-point addition is not
associative, and two runs with one seed must give the same weights. Where everybody's gradient is needed, a frame whose
turn has come is decoded at once, so that on a slow link the work is spread over the arrivals; where some may be
missing, nobody's turn is known before the quorum is there. Gradients of later clocks wait as frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from thinwire.codecs.tensor_set import Checked
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError
from thinwire.packets import EncodedTensor
from thinwire.server.membership import Membership
from thinwire.server.table_group import TableGroup

NOBODY = (-1,)
"""The ranks of an update that a worker's NaN or Inf made everybody skip, or whose workers have all gone away."""

Taken = tuple[FloatArray | None, tuple[int, ...]]
"""The aggregate of one table (None where nobody had a gradient), and the ranks that took part: `NOBODY` where one of
them refused, or all have gone away."""


class Aggregation:
    """The gradients of the current clock and of those ahead of it.

    Args:
        group: the tables.
        members: who is expected to push.
        clock: the current one.
    """

    def __init__(self, group: TableGroup, members: Membership, clock: int = 0) -> None:
        self.group, self.clock = group, clock
        self._members, self._eager = members, members.lockstep
        self._arrived: dict[int, dict[int, Sequence[Checked] | None]] = {clock: {}}
        """By clock and rank, the tables' gradients; None once they are in the sums, and their bytes may go."""
        self._refused: dict[int, set[int]] = {}
        """By clock, the tables of which somebody's gradient is not finite."""
        self._next = 0

    def has(self, rank: int, clock: int | None = None) -> bool:
        """Whether this worker's gradients of a clock (by default the current one) are in."""
        return rank in self._arrived.get(self.clock if clock is None else clock, ())

    @property
    def started(self) -> bool:
        """Whether any worker's gradients of the current clock, or of a later one, are in."""
        return any(self._arrived.values())

    @property
    def arrived(self) -> Set[int]:
        """The ranks whose gradients of the current clock are in."""
        return self._arrived[self.clock].keys()

    @property
    def untouched(self) -> int:
        """The first clock that nobody has begun."""
        return max((clock + 1 for clock, arrived in self._arrived.items() if arrived), default=self.clock)

    @property
    def complete(self) -> bool:
        """Whether enough gradients of the current clock are in."""
        return self._members.complete(self.clock, self.arrived)

    def hold(self, rank: int, frames: Sequence[EncodedTensor], clock: int | None = None) -> None:
        """Takes a worker's gradients, and adds nothing.

        Args:
            rank: whose.
            frames: one for each table.
            clock: by default the current one.

        Raises:
            ProtocolError: one of them is no gradient of its table, in the codec that was agreed on; none is taken.
        """
        clock = self.clock if clock is None else clock
        held, refused = self.group.check(frames)
        self._arrived.setdefault(clock, {})[rank] = held
        if refused:
            self._refused.setdefault(clock, set()).update(refused)

    def resume(self) -> None:
        """Adds what is in for the current clock, where nobody is waited for any more.

        Called with every push, once the last aggregates are no longer needed, and when a worker was dropped.

        Raises:
            FrameError: a gradient holds a damaged payload: the text says of which table, and whose it is. That worker's
                are dropped, and the table's sum is what it was.
        """
        arrived = self._arrived[self.clock]
        highest = max(arrived, default=-1) if self._eager else -1
        while self._next <= highest:
            if self._next not in arrived:
                if self._members.expects(self._next, self.clock):
                    return
            elif (gradients := arrived[self._next]) is not None:
                try:
                    self.group.add(self._next, gradients)
                except FrameError:
                    del arrived[self._next]
                    raise
                arrived[self._next] = None
            self._next += 1

    def take(self) -> list[Taken]:
        """Ends the current clock; returns what came of it for each table. The next clock uses the arrays again.

        Raises:
            FrameError: as for `resume`.
        """
        arrived = self._arrived.pop(self.clock)
        refused = self._refused.pop(self.clock, set())
        if not self._eager:
            for rank in sorted(arrived):
                if (gradients := arrived[rank]) is not None:
                    self.group.add(rank, gradients, but=refused)
        self._next = 0
        self.clock += 1
        self._arrived.setdefault(self.clock, {})
        ranks = tuple(sorted(arrived)) or NOBODY
        indices, aggregates = self.group.indices, self.group.take()
        if not refused:
            return [(each, ranks) for each in aggregates]
        pairs = zip(indices, aggregates, strict=True)
        return [(None, NOBODY) if index in refused else (each, ranks) for index, each in pairs]

    # ---- tables that part, and come together

    @property
    def standing(self) -> Any:
        """Equal where tables have moved as far and heard of the same workers: these may share one state."""
        return self.clock, self._next, {clock: {*arrived} for clock, arrived in self._arrived.items() if arrived}

    def part(self, places: Sequence[int]) -> Aggregation:
        """Returns what is here of some of the tables, given by their places; the others are left to another part."""
        some = Aggregation(self.group.part(places), self._members, self.clock)
        some._next = self._next
        some._arrived = {
            clock: {rank: None if each is None else [each[place] for place in places] for rank, each in came.items()}
            for clock, came in self._arrived.items()
        }
        some._refused = {clock: own for clock, all_ in self._refused.items() if (own := all_ & {*some.group.indices})}
        return some

    @classmethod
    def joined(cls, parts: Sequence[Aggregation]) -> Aggregation:
        """Returns aggregations of one standing as one, with the tables in the order of the plan."""
        first, *others = parts
        if not others:
            return first
        whole = cls(first.group.with_others([each.group for each in others]), first._members, first.clock)
        whole._next = first._next
        order = [(each, place) for each in parts for place in range(len(each.group.indices))]
        order.sort(key=lambda at: at[0].group.indices[at[1]])
        whole._arrived = {
            clock: {rank: _merged(order, clock, rank) for rank in came} for clock, came in first._arrived.items()
        }
        for each in parts:
            for clock, refused in each._refused.items():
                whole._refused.setdefault(clock, set()).update(refused)
        return whole


def _merged(order: Iterable[tuple[Aggregation, int]], clock: int, rank: int) -> Sequence[Checked] | None:
    """One worker's gradients, of tables of several aggregations."""
    found: list[Checked] = []
    for each, place in order:
        gradients = each._arrived[clock][rank]
        found.append(None if gradients is None else gradients[place])
    return found if any(gradient is not None for gradient in found) else None
