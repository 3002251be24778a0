"""Which tables of a shard move together: a message says something of some of them, and these become one lane.

Workers that send all that a shard is to get in one message keep all tables in one lane, and what a message costs does
not grow with them but for the arithmetic. Where messages hold some of the tables, cut anywhere, lanes are cut in the
same places, at worst to single tables, and joined when a message covers several that stand equally.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from thinwire.server.aggregation import Aggregation
from thinwire.server.membership import Membership
from thinwire.server.table_group import TableGroups


class Lanes:
    """The aggregations of a shard's tables, each table in one of them.

    Args:
        groups: of all tables.
        members: who is expected to push.
        clocks: by the index of every table that gradients change, where it begins.
    """

    def __init__(self, groups: TableGroups, members: Membership, clocks: Mapping[int, int]) -> None:
        alike: dict[int, list[int]] = {}
        for index, clock in clocks.items():
            alike.setdefault(clock, []).append(index)
        self._lanes = [Aggregation(groups.of(indices), members, clock) for clock, indices in alike.items()]

    def __iter__(self) -> Iterator[Aggregation]:
        return iter(self._lanes)

    def of(self, indices: Collection[int]) -> list[Aggregation]:
        """Returns the lanes of exactly these tables, as few as can be.

        Args:
            indices: of different tables.
        """
        inside: list[Aggregation] = []
        outside: list[Aggregation] = []
        for lane in self._lanes:
            own = [place for place, index in enumerate(lane.group.indices) if index in indices]
            if len(own) in (0, len(lane.group.indices)):
                (inside if own else outside).append(lane)
            else:
                inside.append(lane.part(own))
                outside.append(lane.part([p for p in range(len(lane.group.indices)) if p not in own]))
        inside = _joined(inside)
        self._lanes = inside + outside
        return inside


def _joined(lanes: list[Aggregation]) -> list[Aggregation]:
    """Joins the lanes that stand equally."""
    if len(lanes) < 2:
        return lanes
    alike: list[tuple[object, list[Aggregation]]] = []
    for lane in lanes:
        standing = lane.standing
        found = next((some for other, some in alike if other == standing), None)
        if found is None:
            alike.append((standing, [lane]))
        else:
            found.append(lane)
    return [Aggregation.joined(some) for _, some in alike]
