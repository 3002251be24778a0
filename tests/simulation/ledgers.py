"""The expected state of a worker's table, by its pushes, and of a shard, by the messages that it heard."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from thinwire.codecs import decode
from thinwire.local.decoupled import LearnerTensor
from thinwire.optimizers.outer_momentum import OuterMomentum
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.schema import Contribution, Delta, Members, Merged, Message, Push, Welcome
from thinwire.server.core import ServerCore
from thinwire.server.merge_engine import MergeEngine
from thinwire.worker.table import WorkerTable

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess

Array = NDArray[np.float32]
Said = tuple[Message, tuple[EncodedTensor, ...]]
CLOSE, RELATIVELY = 1e-4, 1e-5


class Violation(AssertionError):
    """Something that must hold does not."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


def require(condition: bool, rule: str, text: str) -> None:
    if not condition:
        raise Violation(rule, text)


def values_of(frame: EncodedTensor, shape: tuple[int, ...]) -> Array | None:
    """What a push holds; None where it holds no gradient."""
    if isinstance(frame, BatchedTensor):
        return frame.values.reshape(shape)
    if not frame:
        return None
    array: Array = decode(bytes(frame)).numpy().reshape(shape)
    return array


def same(a: Said, b: Said) -> bool:
    """Whether two messages are equal, frame by frame."""
    frames = len(a[1]) == len(b[1]) and all(_equal(x, y) for x, y in zip(a[1], b[1], strict=True))
    return frames and _plain(a[0]) == _plain(b[0])


def _plain(message: Message) -> Message:
    """A message without what packing adds: the sizes of its batch."""
    batched = isinstance(message, Push | Delta | Contribution | Merged)
    return msgspec.structs.replace(message, batch=()) if batched else message


def _equal(a: EncodedTensor, b: EncodedTensor) -> bool:
    if isinstance(a, BatchedTensor) or isinstance(b, BatchedTensor):
        return a == b
    return bytes(a) == bytes(b)


def bits_of(values: Array, outer: OuterMomentum | None) -> bytes:
    """What a copy is, with the momentum that its end adds."""
    ahead = None if outer is None else outer.ahead
    return values.tobytes() + (b"" if ahead is None or not ahead.any() else ahead.numpy().tobytes())


def close(found: Array, expected: Array) -> bool:
    return bool((np.abs(found - expected) <= CLOSE + RELATIVELY * np.abs(expected)).all())


class TableLedger:
    """One table at one worker: what the residual must be."""

    def __init__(self, table: WorkerTable) -> None:
        self.table = table
        shape = table.spec.shape
        residual = table.residual
        self.pending = np.zeros(shape, np.float32)
        self.expected = np.zeros(shape, np.float32) if residual is None else residual.numpy().reshape(shape).copy()
        self.before: dict[int, Array] = {}
        """By clock: the residual before that push, until its answer is here."""
        held = None if table.context is None else table.state_dict().get("accumulated")
        if held is not None:
            self.pending += held.numpy()

    def pushed(self, clock: int, frame: EncodedTensor) -> None:
        sent = values_of(frame, self.table.spec.shape)
        if sent is not None:
            self.before[clock] = self.expected
            self.expected = self.expected + self.pending - sent
            self.pending = np.zeros_like(self.pending)

    def answered(self, clock: int, *, missed: bool) -> None:
        before = self.before.pop(clock)
        if missed:
            self.expected = before

    def check(self, who: str) -> None:
        residual = self.table.residual
        if residual is not None:
            found = residual.numpy().reshape(self.expected.shape)
            if not close(found, self.expected):
                text = f"{found.tolist()} is left unsent; it pushed, and so must be {self.expected.tolist()}"
                raise Violation("residual", f"{who}: {self.table.spec.name}: {text}")


class Shard:
    """One life of one shard, as its messages show it."""

    def __init__(self, core: ServerCore) -> None:
        self.core = core
        self.heard: dict[int, int] = defaultdict(int)
        self.told: dict[int, list[Said]] = defaultdict(list)
        self.owners: dict[int, WorkerProcess] = {}
        self.waiting: dict[tuple[int, int, int], Array | None] = {}
        """Gradients that are in and not yet in an update, by (table, clock, rank)."""
        self.rates: dict[int, dict[int, tuple[float, ...]]] = defaultdict(dict)
        """By clock and rank."""
        self.versions: list[int] = []
        self.values: list[Array] = []
        self.bits: dict[tuple[int, int, int], bytes] = {}
        """Of the workers' copies, by (table, version, rank or −1 for all)."""
        self.remember()

    @property
    def replaced(self) -> bool:
        """Whether the core has other tables than it had: it has just begun, or has gone back."""
        now = self.core.tables
        return len(now) != len(self.tables) or any(a is not b for a, b in zip(self.tables, now, strict=True))

    def remember(self) -> None:
        """Takes the tables as they are, and forgets what was."""
        self.tables = list(self.core.tables)
        self.waiting.clear()
        self.rates.clear()
        self.bits = {}
        self.versions = [table.version for table in self.core.tables]
        self.values = [table.values.numpy().copy() for table in self.core.tables]


@dataclass
class Sum:
    """What one learner has contributed to one table, and no version holds."""

    values: Array = field(default_factory=lambda: np.zeros(1, np.float32))
    examples: float = 0.0
    steps: int = 0
    base: int = 1 << 60


@dataclass
class Inbox:
    """The contributions to one table of one shard."""

    waiting: dict[WorkerProcess, Sum] = field(default_factory=lambda: defaultdict(Sum))
    newest: dict[WorkerProcess, Contribution] = field(default_factory=dict)
    came: dict[WorkerProcess, float] = field(default_factory=dict)
    interval: dict[WorkerProcess, float] = field(default_factory=dict)
    until: float | None = None
    """When the grace window ends that has begun."""
    late: float | None = None
    """When something happened at the shard, and it did not merge what was due."""
    last: float = 0.0
    """When the newest version was made, or a learner came or went."""

    def take(self, who: WorkerProcess, message: Contribution, base: int, values: Array | None, now: float) -> None:
        if values is not None:
            each = self.waiting[who]
            each.values, each.base = each.values + values, min(each.base, base)
            each.examples, each.steps = each.examples + message.examples, each.steps + message.steps
        self.interval[who] = now - self.came.get(who, -math.inf)
        self.came[who], self.newest[who] = now, message

    def has_quorum(self, k: int, missing: list[int]) -> bool:
        """Whether enough have contributed, where so many ranks have not."""
        here = len(self.waiting)
        return 0 < here >= min(k, here + len(missing))

    def shares(self, version: int, discount: float) -> dict[WorkerProcess, float]:
        """Returns each contribution's weight in the version after this one."""
        raw = {w: s.examples**2 / s.steps * (1 + version - s.base) ** -discount for w, s in self.waiting.items()}
        return {who: each / sum(raw.values()) for who, each in raw.items()}

    def window(self, known: set[WorkerProcess], now: float, grace: float) -> float:
        """Returns how long a grace window that begins now is."""
        again = [who for who in self.waiting if who in known and not self.newest[who].ended]
        next_at = [self.came[who] + self.interval[who] for who in again]
        return min(grace, max(0.0, min(next_at, default=math.inf) - now))


def mean_of(given: list[tuple[Array, float]], merge: str) -> Array | None:
    """The weighted mean of some arrays; of `radial`, that of their directions, as long as the mean of their lengths."""
    if not given:
        return None
    lengths = [float(np.linalg.norm(values)) or 1.0 if merge == "radial" else 1.0 for values, _ in given]
    parts = [values * (share / length) for (values, share), length in zip(given, lengths, strict=True)]
    mean = np.sum(parts, axis=0)
    if merge == "radial" and mean.any():
        mean *= sum(length * share for (_, share), length in zip(given, lengths, strict=True)) / np.linalg.norm(mean)
    return np.asarray(mean, np.float32)


@dataclass
class Book:
    """What a learner has beside θ of one tensor."""

    own: LearnerTensor
    table: WorkerTable
    version: int
    contributed_at: int
    progress: Array
    residual: Array
    waiting: list[tuple[int, Array]] = field(default_factory=list)
    """Inner steps, and what was sent then."""

    def sent(self, step: int, values: Array | None) -> None:
        self.contributed_at = step
        if values is not None:
            self.residual, self.progress = self.residual + self.progress - values, np.zeros_like(self.progress)
            self.waiting.append((step, values))

    def check(self, who: str) -> None:
        """local = θ − waiting − residual − progress."""
        waiting = sum((values for _, values in self.waiting), np.zeros_like(self.progress))
        theta, local = self.own.shared.numpy(), self.own.local.numpy()
        kept = (self.table.residual, self.residual), (self.own.waiting, waiting)
        right = close(local, theta - waiting - self.residual - self.progress)
        if not right or not all(a is None or close(a.numpy(), b) for a, b in kept):
            parts = f"waiting {waiting}, residual {self.residual} and progress {self.progress}"
            raise Violation("progress once", f"{who}: {self.own.name} is {local}; of {theta} less {parts}")


def contributed_to(core: ServerCore) -> object:
    """All at a shard that a contribution may change."""
    engine = core._engine
    assert isinstance(engine, MergeEngine)
    each = engine.contributions
    learners = [
        (a.rank, a.is_known, a.rates, {p: v.tobytes() for p, v in a.sums.items()}, row.tobytes())
        for a, row in zip(each._learners, each._entries, strict=True)
        if (row["step"] >= 0).any()
    ]
    tables = [(table.version, table.values.numpy().tobytes()) for table in core.tables]
    return learners, each._until.tobytes(), each.examples.tobytes(), tables, core.sessions


def has_looked(answer: Message) -> bool:
    """Whether a shard that sends this answer has looked for due tables."""
    return isinstance(answer, Welcome | Merged) or (isinstance(answer, Members) and not answer.interrupted)
