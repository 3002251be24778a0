"""When an update must go without workers that are late, by the documented rule: an exchange that takes longer than
median + max(grace, 6 · MAD) of the last 64, where enough others have sent everything. Then, and at no other time.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from tests.simulation.ledgers import require
from thinwire.schema import Delta, Message

if TYPE_CHECKING:
    from tests.simulation.ledgers import Shard

RECENT, ENOUGH, DEVIATIONS = 64, 8, 6
NEVER = 1 << 62


class Patience:
    """What one life of a shard knows of its exchanges, by its own clock."""

    def __init__(self, grace_s: float, min_workers: int) -> None:
        self._grace_s, self._min_workers = grace_s, min_workers
        self._begins: dict[int, int] = {}
        self._times: list[float] = []
        self._ranks: tuple[int, ...] = ()
        self._step, self._since = -1, 0.0
        self._now, self._late = 0.0, frozenset[int]()
        self._lacking: set[tuple[int, int]] = set()
        """The tables, and by whom, that the exchange under way lacks."""

    def expects(self, rank: int, clock: int) -> bool:
        """Whether a gradient of this rank will be in the update of a clock."""
        return self._begins.get(rank, 0) <= clock

    def welcomed(self, ranks: list[int], begin: int) -> None:
        self._begins |= dict.fromkeys(ranks, begin)

    def look(self, shard: Shard, now: float, ranks: tuple[int, ...] | None) -> None:
        """The shard is told the time: who must be left out now?"""
        core, self._now, self._late = shard.core, now, frozenset()
        if ranks is None or core.failed is not None:
            return
        step = core.step
        if ranks != self._ranks or step < self._step:  # what a change takes is no exchange's time
            self._step, self._since, self._ranks = step, now, ranks
        elif step > self._step:
            exchanges = step - self._step
            self._times += [(now - self._since) / exchanges] * exchanges
            self._step, self._since = step, now
        recent = self._times[-RECENT:]
        if len(recent) < ENOUGH:
            return
        typical = median(recent)
        spread = median(abs(each - typical) for each in recent)
        if now - self._since <= typical + max(self._grace_s, DEVIATIONS * spread):
            return
        oldest = [i for i, table in enumerate(core.tables) if not table.spec.state and table.version == step]
        expected = {rank for rank in ranks if self.expects(rank, step)}
        in_time = {rank for rank in expected if all((i, step, rank) in shard.waiting for i in oldest)}
        if oldest and len(in_time) >= self._min_workers:
            self._late = frozenset(expected - in_time)
            self._lacking = {(i, rank) for i in oldest for rank in self._late if (i, step, rank) not in shard.waiting}

    def check(self, shard: Shard, messages: list[Message]) -> None:
        """The shard has answered: it made an update without those, or made none."""
        made = [message for message in messages if isinstance(message, Delta)]
        # What a late worker sent of some tables before it stopped is in their updates.
        without = all(
            message.ranks
            and not self._lacking.intersection((table, rank) for table in message.tables for rank in message.ranks)
            for message in made
        )
        elapsed = f"{self._now - self._since:.2f} s after the last update"
        require(
            bool(made) == bool(self._late) and without,
            "stragglers",
            f"{elapsed} an update must be made without {sorted(self._late) or 'none'}; made were "
            f"{[message.ranks for message in made]}",
        )
        if self._late:
            self._begins |= dict.fromkeys(self._late, NEVER)
            self._step, self._since = shard.core.step, self._now
