"""What must be: of a table at a worker by what it pushed, of a shard by what it was told."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from thinwire.codecs import decode
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.schema import Delta, Message, Push
from thinwire.server.core import ServerCore
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
    return msgspec.structs.replace(message, batch=()) if isinstance(message, Push | Delta) else message


def _equal(a: EncodedTensor, b: EncodedTensor) -> bool:
    if isinstance(a, BatchedTensor) or isinstance(b, BatchedTensor):
        return a == b
    return bytes(a) == bytes(b)


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
