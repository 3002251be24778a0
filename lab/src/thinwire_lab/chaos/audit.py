"""A shard's journal, held against what the design promises: no gradient lost, none counted twice.

Every update of a table leads from its version to the next one, and is of the gradients that came for that clock from
the workers that it names, each once. The audit counts missing gradients, and updates made again after a restart.

Learners that never wait count their own steps: an update is of all that came since the one before. One that died is not
named, though its last contributions count.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from thinwire.policies.consistency import consistency
from thinwire.runtime.journal import AnyEntry, Began, Joined, Planned, Took, Updated

MAX_PROBLEMS = 20
NOBODY = (-1,)  # the ranks of an update that everybody skips


class Audit:
    """Reads one shard's journal entry by entry."""

    def __init__(self) -> None:
        self.problems: list[str] = []  # what went wrong, in words; of many the first
        self.version = self.redone = self.skipped = 0  # updates that every table has had
        self.first_at = self.last_at = 0.0  # when the first and the newest version were complete
        self._first = 0
        self._highest = 0
        self._workers = 0
        self._missing: Counter[int] = Counter()
        self._late: Counter[int] = Counter()
        self._without: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self._immediate = self._decoupled = False
        self._versions: dict[int, int] = {}
        self._come: dict[int, dict[int, Counter[int]]] = {}
        self._newest: dict[tuple[int, int], int] = {}  # by table and learner: the inner steps of what came last

    @property
    def missing(self) -> float:
        """Gradients that updates were made without, in units of one worker's whole model."""
        return sum(self._missing.values()) / max(1, len(self._versions))

    @property
    def late(self) -> float:
        """Gradients that came after an update which had gone without them, in the same unit."""
        return sum(self._late.values()) / max(1, len(self._versions))

    @property
    def steps_per_second(self) -> float:
        """Versions that were reached for the first time, by time; 0 before there are two."""
        seconds = self.last_at - self.first_at
        return (self._highest - self._first) / seconds if seconds > 0 else 0.0

    def add(self, entry: AnyEntry) -> None:
        match entry:
            case Began():
                self._versions = dict.fromkeys(self._versions, entry.step)
                self.version = entry.step
                self._come = {table: defaultdict(Counter) for table in self._versions}
            case Planned():
                self._plan(entry)
            case Joined() if self._decoupled:
                self._forget(entry.rank)
            case Took() if self._decoupled:
                self._contribute(entry)
            case Took():
                self._take(entry)
            case Updated():
                self._update(entry)

    def _plan(self, entry: Planned) -> None:
        policy = consistency(entry.consistency)
        self._workers, self._immediate, self._decoupled = entry.workers, policy.immediate, policy.decoupled
        self._versions = {table: self.version for table in range(entry.tables) if table not in entry.state}
        self._come = {table: defaultdict(Counter) for table in self._versions}

    def _take(self, entry: Took) -> None:
        for table in entry.tables:
            if table not in self._versions:
                continue
            clock = 0 if self._immediate else entry.step
            if not self._immediate and entry.step < self._versions[table]:
                self._late[table] += 1
                try:
                    self._without[table].remove((entry.step, entry.rank))
                except KeyError:
                    self._say(
                        f"a gradient of step {entry.step} came from worker {entry.rank} for table {table}, which "
                        f"is at {self._versions[table]}"
                    )
                continue
            come = self._come[table][clock]
            come[entry.rank] += 1
            if come[entry.rank] > 1 and not self._immediate:
                self._say(f"worker {entry.rank} gave two gradients of step {entry.step} for table {table}")

    def _forget(self, rank: int) -> None:
        """Another process has a rank: it begins to count, and hears nothing of what the one before contributed."""
        for table, come in self._come.items():
            come[0].pop(rank, None)
            self._newest.pop((table, rank), None)

    def _contribute(self, entry: Took) -> None:
        """Takes what a learner contributed; one that ends without another step contributes nothing."""
        for table in self._versions.keys() & entry.tables:
            if entry.step > self._newest.get((table, entry.rank), -1):
                self._come[table][0][entry.rank] += 1
                self._newest[table, entry.rank] = entry.step

    def _update(self, entry: Updated) -> None:
        for table in entry.tables:
            if table not in self._versions:
                continue
            if entry.version != self._versions[table] + 1:
                self._say(f"table {table} went from version {self._versions[table]} to {entry.version}")
            self._versions[table] = entry.version
            if self._immediate:
                self._account_single(table, entry)
            elif self._decoupled:
                self._account_merge(table, entry)
            else:
                self._account(table, entry)
        version = min(self._versions.values())
        if version != self.version:
            self._reach(version, entry.at)

    def _account(self, table: int, entry: Updated) -> None:
        """An update of one clock: of everybody's gradients that came for it."""
        come = set(self._come[table].pop(entry.version - 1, ()))
        if entry.ranks == NOBODY:
            self.skipped += 1
            return
        named = set(entry.ranks or range(self._workers))
        self._missing[table] += max(0, self._workers - len(named))
        self._without[table] |= {(entry.version - 1, rank) for rank in range(self._workers) if rank not in named}
        for rank in sorted(named - come):
            self._say(f"update {entry.version} of table {table} names worker {rank}, whose gradient did not come")
        for rank in sorted(come - named):
            self._say(f"update {entry.version} of table {table} lacks worker {rank}'s gradient, which had come")

    def _account_single(self, table: int, entry: Updated) -> None:
        """An update of one push."""
        come = self._come[table][0]
        for rank in entry.ranks:
            come[rank] -= 1
            if come[rank] < 0:
                self._say(f"update {entry.version} of table {table} is of a gradient of worker {rank} that never came")

    def _account_merge(self, table: int, entry: Updated) -> None:
        """An update of all that has come: of a learner that is named at least one contribution."""
        come = set(self._come[table].pop(0, ()))
        for rank in sorted(set(entry.ranks) - come):
            self._say(f"update {entry.version} of table {table} names learner {rank}, who contributed nothing")
        for rank in sorted(come - set(entry.ranks)):
            self._say(f"update {entry.version} of table {table} lacks what learner {rank} had contributed")

    def _reach(self, version: int, at: float) -> None:
        self.version = version
        if version <= self._highest:
            self.redone += 1
            return
        if self._highest == 0:
            self.first_at, self._first = at, version
        self._highest, self.last_at = version, at

    def _say(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)
