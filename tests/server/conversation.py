"""A shard without a transport: what each peer was told, and what a worker's copy of the model becomes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.sent_frames import as_frames
from thinwire.codecs import Codec, codec, decode
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.schema import Delta, Join, Message, Offer, Plan, Push, Refused, Resume, TableSpec, Values
from thinwire.server.core import ServerCore
from thinwire.server.effects import Close, Effect, Send
from thinwire.worker.offers import agreed_step

Array = NDArray[np.float32]

PLAIN = codec("fp32")
THREE = codec("3lc", sparsity=1.5)

WEIGHT, BIAS, STATISTIC = 0, 1, 2
SHAPES: dict[int, tuple[int, ...]] = {WEIGHT: (8, 5), BIAS: (5,), STATISTIC: (3,)}


def make_plan(
    workers: int = 2,
    *,
    up: Codec = THREE,
    down: Codec = THREE,
    state: bool = False,
    optimizer: str = "SGD",
    groups: tuple[dict[str, Any], ...] = ({"momentum": 0.5},),
    **others: Any,
) -> Plan:
    """A compressed weight, an uncompressed bias and, with `state`, a buffer."""
    tables = [TableSpec(name="weight", shape=SHAPES[WEIGHT], up=1, down=2), TableSpec(name="bias", shape=SHAPES[BIAS])]
    if state:
        tables.append(TableSpec(name="statistic", shape=SHAPES[STATISTIC], state=True))
    return Plan(
        workers=workers,
        tables=tuple(tables),
        codecs=(PLAIN.config(), up.config(), down.config()),
        optimizer=optimizer,
        groups=groups,
        **others,
    )


def gradient(rank: int, step: int, table: int) -> Array:
    """Another one for each worker, step and table."""
    generator = np.random.default_rng([rank, step, table])
    return generator.standard_normal(SHAPES[table], np.float32)


class Shard:
    """A server core, and a list of what it said to each peer. Peer r is the worker of rank r, unless said otherwise.

    Workers that `join` choose a step by what they are offered; of those that say their own Join, `told` holds offers.
    """

    def __init__(self, plan: Plan | None = None, *, begin: bool = True, min_workers: int | None = None) -> None:
        self.plan = plan or make_plan()
        self.core = ServerCore(min_workers)
        self.told: dict[int, list[tuple[Message, tuple[bytes, ...]]]] = defaultdict(list)
        self.ended: dict[int, str | None] = {}
        self._have: dict[int, tuple[int, ...]] = {}
        if begin:
            for rank in range(self.plan.workers):
                self.join(rank)
            self.give_values(0)

    def carry_out(self, effects: list[Effect]) -> None:
        offers: dict[int, Offer] = {}
        for effect in effects:
            match effect:
                case Send(peers, Offer() as offer, _) if self._have.keys() >= {*peers}:
                    offers |= dict.fromkeys(peers, offer)
                case Send(peers, message, frames):
                    for peer in peers:
                        self.told[peer].append((message, as_frames(self.plan, message, frames)))
                case Close(peer, message):
                    assert message is None or isinstance(message, Refused)
                    self.ended[peer] = None if message is None else message.reason
        for peer, offer in offers.items():
            if (step := agreed_step({0: offer})) is not None:
                self.say(peer, Resume(step=step, have=self._have[peer]))

    def lose(self, peer: int) -> None:
        """A worker dies."""
        self.carry_out(self.core.closed(peer, "connection reset"))

    def say(self, peer: int, message: Message, frames: tuple[EncodedTensor, ...] = ()) -> None:
        self.carry_out(self.core.received(peer, message, frames))

    def join(self, rank: int, *, peer: int | None = None, have: tuple[int, ...] = ()) -> None:
        self._have[peer := rank if peer is None else peer] = have
        self.say(peer, Join(rank=rank, plan=self.plan, steps=have[:1]))

    def give_values(self, peer: int) -> None:
        frames = tuple(PLAIN.encode(gradient(99, 0, table)) for table in range(len(self.plan.tables)))
        self.say(peer, Values(tables=tuple(range(len(frames))), versions=(0,) * len(frames)), frames)

    def push(
        self, peer: int, step: int, frames: Mapping[int, EncodedTensor], *, rate: float = 0.1, last: bool = False
    ) -> None:
        rates = (rate,) * len(self.plan.groups)
        self.say(peer, Push(step=step, tables=tuple(frames), rates=rates, last=last), tuple(frames.values()))

    def frames(self, rank: int, step: int) -> dict[int, bytes]:
        """One worker's gradients of one step, without the buffer."""
        options: dict[str, Any] = {**self.plan.codecs[1]}
        up = codec(**options)
        return {WEIGHT: up.encode(gradient(rank, step, WEIGHT)), BIAS: PLAIN.encode(gradient(rank, step, BIAS))}

    def pieces(self, rank: int, step: int) -> dict[int, EncodedTensor]:
        """As `frames`, with what travels uncompressed in a batch."""
        return {**self.frames(rank, step), BIAS: BatchedTensor.of(gradient(rank, step, BIAS), "bias")}

    def step(self, step: int, *ranks: int, rate: float = 0.1) -> None:
        """All workers, or some, push everything, in the order of their ranks."""
        for rank in ranks or range(self.plan.workers):
            self.push(rank, step, self.frames(rank, step), rate=rate)

    def bits(self) -> list[bytes]:
        """Every bit of the tables: the server's values and the workers' copies."""
        return [
            part
            for table in self.core.tables
            for part in (table.values.numpy().tobytes(), table.downlink.snapshot(0).tobytes())
        ]

    def deltas(self, peer: int = 0) -> dict[tuple[int, int], bytes]:
        """The deltas that a peer was told, by table and version."""
        return {
            (table, message.version): frame
            for message, frames in self.told[peer]
            if isinstance(message, Delta)
            for table, frame in zip(message.tables, frames, strict=True)
        }

    def copy_of(self, peer: int, start: dict[int, tuple[int, Array]] | None = None) -> dict[int, tuple[int, Array]]:
        """What a worker that applies all it was told ends with: version and values of each table."""
        held = dict(start or {})
        for message, frames in self.told[peer]:
            if isinstance(message, Values):
                for table, version, frame in zip(message.tables, message.versions, frames, strict=True):
                    held[table] = (version, decode(frame).numpy().copy())
            elif isinstance(message, Delta):
                for table, frame in zip(message.tables, frames, strict=True):
                    if self.plan.tables[table].state:
                        held[table] = (message.version, decode(frame).numpy().copy())
                        continue
                    version, values = held.get(table, (0, decode(PLAIN.encode(gradient(99, 0, table))).numpy()))
                    assert message.version == version + 1
                    if frame:
                        values = values.copy()
                        decode(frame, out=values, accumulate=True)
                    held[table] = (message.version, values)
        return held
