"""Checks a shard's journal: no gradient is lost, none is counted twice, and workers return after faults.

Every update of a table leads from its version to the next one. It contains the gradients that arrived for that clock
from the workers that it names, each once. The audit counts missing gradients and updates repeated after a restart.

Decoupled learners count their own steps: an update contains all contributions since the update before it. It does not
name a learner that died, though that learner's last contributions count.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from thinwire.policies.consistency import consistency
from thinwire.runtime.journal import AnyEntry, Began, Joined, Planned, Took, Updated

MAX_PROBLEMS = 20
SKIPPED = (-1,)  # the ranks of an update that all workers skip


class JournalReader:
    """Reads a journal, which may not exist yet, while the server writes it."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._decoder = msgspec.json.Decoder(AnyEntry)

    def entries(self) -> Iterator[AnyEntry]:
        """Yields the lines completed since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield self._decoder.decode(line)


class Audit:
    """Reads one shard's journal entry by entry."""

    def __init__(self) -> None:
        self.problems: list[str] = []  # the first of the errors found
        self.version = self.redone = 0  # updates that every table has had, and updates made again
        self.first_at = self.last_at = 0.0  # when the first and the newest version were complete
        self._first = 0
        self._highest = 0
        self._workers = 0
        self._missing: Counter[int] = Counter()
        self._late: Counter[int] = Counter()
        self._without: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self._immediate = self._decoupled = False
        self._versions: dict[int, int] = {}
        self._arrived: dict[int, dict[int, Counter[int]]] = {}
        self._newest: dict[tuple[int, int], int] = {}  # inner steps of the newest contribution, by table and learner

    @property
    def missing(self) -> float:
        """Gradients that updates lack, in units of one worker's whole model."""
        return sum(self._missing.values()) / max(1, len(self._versions))

    @property
    def late(self) -> float:
        """Gradients that arrived after the update that lacks them, in the same unit."""
        return sum(self._late.values()) / max(1, len(self._versions))

    @property
    def steps_per_second(self) -> float:
        """New versions a second; 0 before there are two."""
        seconds = self.last_at - self.first_at
        return (self._highest - self._first) / seconds if seconds > 0 else 0.0

    def add(self, entry: AnyEntry) -> None:
        match entry:
            case Began():
                self._versions = dict.fromkeys(self._versions, entry.step)
                self.version = entry.step
                self._arrived = {table: defaultdict(Counter) for table in self._versions}
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
        self._arrived = {table: defaultdict(Counter) for table in self._versions}

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
                    self._note(
                        f"a gradient of step {entry.step} came from worker {entry.rank} for table {table}, which "
                        f"is at {self._versions[table]}"
                    )
                continue
            arrived = self._arrived[table][clock]
            arrived[entry.rank] += 1
            if arrived[entry.rank] > 1 and not self._immediate:
                self._note(f"worker {entry.rank} sent two gradients of step {entry.step} for table {table}")

    def _forget(self, rank: int) -> None:
        """Forgets the contributions of a rank's earlier process: the new process counts from its own start."""
        for table, arrived in self._arrived.items():
            arrived[0].pop(rank, None)
            self._newest.pop((table, rank), None)

    def _contribute(self, entry: Took) -> None:
        """Notes a learner's contribution; a learner that ends without another step contributes nothing."""
        for table in self._versions.keys() & entry.tables:
            if entry.step > self._newest.get((table, entry.rank), -1):
                self._arrived[table][0][entry.rank] += 1
                self._newest[table, entry.rank] = entry.step

    def _update(self, entry: Updated) -> None:
        for table in entry.tables:
            if table not in self._versions:
                continue
            if entry.version != self._versions[table] + 1:
                self._note(f"table {table} went from version {self._versions[table]} to {entry.version}")
            self._versions[table] = entry.version
            if self._immediate:
                self._check_single(table, entry)
            elif self._decoupled:
                self._check_merge(table, entry)
            else:
                self._check(table, entry)
        version = min(self._versions.values())
        if version != self.version:
            self._reach(version, entry.at)

    def _check(self, table: int, entry: Updated) -> None:
        """Checks an update of one clock: it contains all gradients that arrived for it."""
        arrived = set(self._arrived[table].pop(entry.version - 1, ()))
        if entry.ranks == SKIPPED:
            return
        named = set(entry.ranks or range(self._workers))
        self._missing[table] += max(0, self._workers - len(named))
        self._without[table] |= {(entry.version - 1, rank) for rank in range(self._workers) if rank not in named}
        for rank in sorted(named - arrived):
            self._note(f"update {entry.version} of table {table} names worker {rank}, whose gradient did not arrive")
        for rank in sorted(arrived - named):
            self._note(f"update {entry.version} of table {table} lacks worker {rank}'s gradient, which had arrived")

    def _check_single(self, table: int, entry: Updated) -> None:
        """Checks an update of one push."""
        arrived = self._arrived[table][0]
        for rank in entry.ranks:
            arrived[rank] -= 1
            if arrived[rank] < 0:
                self._note(
                    f"update {entry.version} of table {table} has a gradient of worker {rank} that never arrived"
                )

    def _check_merge(self, table: int, entry: Updated) -> None:
        """Checks an update of all contributions so far: each learner that it names made at least one."""
        arrived = set(self._arrived[table].pop(0, ()))
        for rank in sorted(set(entry.ranks) - arrived):
            self._note(f"update {entry.version} of table {table} names learner {rank}, which contributed nothing")
        for rank in sorted(arrived - set(entry.ranks)):
            self._note(f"update {entry.version} of table {table} lacks learner {rank}'s contributions")

    def _reach(self, version: int, at: float) -> None:
        self.version = version
        if version <= self._highest:
            self.redone += 1
            return
        if self._highest == 0:
            self.first_at, self._first = at, version
        self._highest, self.last_at = version, at

    def _note(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


class Returns:
    """Records when faults hit workers, and when the workers return. All times are seconds since the epoch.

    Each worker that returns adds to `back` the seconds since its death or the end of its fault, to `joining` the
    seconds since its Join. `waiting` holds, by rank, the time from which on a worker may return.
    """

    def __init__(self) -> None:
        self.back: list[float] = []
        self.joining: list[float] = []
        self.waiting: dict[int, float] = {}
        self._dead: set[int] = set()
        self._joined: dict[int, float] = {}

    def strike(self, rank: int, at: float, *, lasts: bool = False, dies: bool = False, for_good: bool = False) -> None:
        """Records a fault. A worker that `dies` has to join again; if the fault `lasts`, it is away until `lift`."""
        (self._dead.add if dies else self._dead.discard)(rank)
        if not for_good:
            self.waiting[rank] = math.inf if lasts else at

    def lift(self, rank: int, at: float) -> None:
        """Records the end of a worker's fault."""
        self.waiting[rank] = at

    def read(self, entry: AnyEntry) -> None:
        """Reads an entry of the server's journal."""
        match entry:
            case Joined():
                self._joined[entry.rank] = entry.at
                self._dead.discard(entry.rank)
            case Took() if entry.rank not in self._dead and entry.at > self.waiting.get(entry.rank, math.inf):
                since = self.waiting.pop(entry.rank)
                self.back.append(entry.at - since)
                if (joined := self._joined.get(entry.rank, 0.0)) > since:
                    self.joining.append(entry.at - joined)
