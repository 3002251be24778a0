"""Worker cores against server cores: a queue for each direction, and chance decides who moves and what arrives."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import thinwire as tw
from thinwire.optimizers.options import ParameterGroups
from thinwire.policies.assignment import Partition
from thinwire.policies.consistency import consistency, name_of
from thinwire.policies.designs import Design
from thinwire.policies.sampling import Memberships
from thinwire.schema import Message, Plan, TableSpec
from thinwire.server.core import ServerCore
from thinwire.server.effects import Close, Effect, Send
from thinwire.worker.core import Worker
from thinwire.worker.effects import Effect as WorkerEffect
from thinwire.worker.effects import Poll, Procedure, Receive
from thinwire.worker.effects import Send as Push
from thinwire.worker.model import PlannedTensor

SHARDS, WORKERS = 2, 3
SHAPES = {"weight": (8, 40), "bias": (5,), "statistic": (3,)}
PLAIN = tw.codec("fp32")


@dataclass
class Player:
    """One process of a rank: its worker and model, the messages on their way, and what it is about to do."""

    worker: Worker
    model: dict[str, torch.Tensor]
    up: list[deque[Push]] = field(default_factory=lambda: [deque() for _ in range(SHARDS)])
    down: list[deque[tuple[Message, tuple[Any, ...]]]] = field(default_factory=lambda: [deque() for _ in range(SHARDS)])
    knew: dict[int, Memberships] = field(default_factory=dict)
    """Who divided the data, as it knew when it took the examples of each step."""
    waiting: WorkerEffect | None = None
    done: bool = False
    dead: bool = False

    @property
    def rank(self) -> int:
        return self.worker.rank

    @property
    def blocked(self) -> bool:
        return isinstance(self.waiting, Receive) and not self.down[self.waiting.shard]

    def receive(self, shard: int) -> None:
        self.worker.conversations[shard].received(*self.down[shard].popleft())

    def move(self, program: Procedure[None]) -> None:
        if isinstance(self.waiting, Receive):
            self.receive(self.waiting.shard)
        try:
            effect = self.waiting = next(program)
        except StopIteration:
            self.waiting, self.done = None, True
            return
        if isinstance(effect, Push):
            self.up[effect.shard].append(effect)
        elif isinstance(effect, Poll):
            while self.down[effect.shard]:
                self.receive(effect.shard)


def make_player(rank: int, chosen: Design, *, chunk_nbytes: int = 100) -> Player:
    """The weight is in two partitions on two shards, the bias on the second, the buffer on the first."""
    codecs = (PLAIN.config(), chosen.up.config(), chosen.down.config())
    first = TableSpec(name="weight[0:100]", shape=(100,), up=1, down=2)
    second = TableSpec(name="weight[100:320]", shape=(220,), up=1, down=2)
    buffer = TableSpec(name="statistic", shape=SHAPES["statistic"], state=True)
    tables = ((first, buffer), (TableSpec(name="bias", shape=SHAPES["bias"]), second))
    plans = [
        Plan(
            workers=WORKERS,
            tables=each,
            codecs=codecs,
            optimizer="SGD",
            groups=({"momentum": 0.5},),
            state_interval=2,
            consistency=name_of(consistency(chosen.consistency)),
            downlink=chosen.downlink,
        )
        for each in tables
    ]
    generator = torch.Generator().manual_seed(rank)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    placed = {
        "weight": ((Partition(0, 0, 100), 0), (Partition(1, 100, 320), 1)),
        "bias": ((Partition(1, 0, 5), 0),),
        "statistic": ((Partition(0, 0, 3), 1),),
    }
    tensors = [
        PlannedTensor(name, tensor, name == "statistic", chosen.up if name == "weight" else PLAIN, placed[name])
        for name, tensor in model.items()
    ]
    groups = ParameterGroups("SGD", [{"lr": 0.1, "momentum": 0.5}], {"momentum": 0})
    ticks = iter(range(10**9))
    worker = Worker(
        plans, tensors, chosen, groups, rank=rank, now=lambda: float(next(ticks)), chunk_nbytes=chunk_nbytes
    )
    return Player(worker, model)


def gradient(rank: int, step: int, name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * step + 10 * rank + len(name)))


Program = Callable[[Player], Procedure[None]]
"""What hooks and a training loop would call."""


class Cluster:
    """Shards and processes; chance decides who moves and what arrives.

    Args:
        chosen: the design.
        program: what each process does.
        seed: of chance.
        least: `min_workers` of the shards.
        deaths: how likely a move is that a process dies, or that one comes in the place of a dead one.
        replaced: how likely a move is that another process takes a rank, whose connection broke.
        impatient: at random moments a shard finds that a worker it waits for is late.
    """

    def __init__(
        self,
        chosen: Design,
        program: Program,
        seed: int,
        *,
        least: int | None = None,
        deaths: float = 0,
        replaced: float = 0,
        impatient: bool = False,
        chunk_nbytes: int = 100,
    ) -> None:
        self._design, self._program, self._chunk_nbytes = chosen, program, chunk_nbytes
        self.cores = [ServerCore(least, straggler_grace_s=1.0 if impatient else None) for _ in range(SHARDS)]
        self._deaths, self._replaced, self._now = deaths, replaced, 0.0
        self._chance = random.Random(seed)
        self.players: list[Player] = []
        self._programs: list[Procedure[None]] = []
        for rank in range(WORKERS):
            self.start(rank)

    def start(self, rank: int) -> None:
        self.players.append(make_player(rank, self._design, chunk_nbytes=self._chunk_nbytes))
        self._programs.append(self._program(self.players[-1]))

    @property
    def survivors(self) -> list[Player]:
        return [player for player in self.players if not player.dead]

    def run(self) -> None:
        while moves := [move for peer in range(len(self.players)) for move in self._moves(peer)]:
            begun = all(core.step > 0 for core in self.cores)
            here = [peer for peer, player in enumerate(self.players) if not player.dead and not player.done]
            missing = sorted({*range(WORKERS + 2)} - {player.rank for player in self.survivors})
            if begun and here and self._happens(self._replaced):
                self._replace(self._chance.choice(here))
            elif begun and len(here) > 1 and self._happens(self._deaths):
                self._kill(self._chance.choice(here))
            elif begun and here and missing and self._happens(self._deaths):
                self.start(self._chance.choice(missing))
            else:
                self._chance.choice(moves)()
                self._now += 0.01
                for shard, core in enumerate(self.cores):
                    self._carry_out(shard, core.waited(self._now + 60 * self._happens(0.03)))
        assert all(player.done for player in self.survivors), "a worker waits for ever"

    def _happens(self, likely: float) -> bool:
        return likely > 0 and self._chance.random() < likely

    def _moves(self, peer: int) -> list[Callable[[], None]]:
        player = self.players[peer]
        if player.dead:
            return []
        move = [] if player.done or player.blocked else [partial(player.move, self._programs[peer])]
        return [*move, *(partial(self._deliver, peer, shard) for shard in range(SHARDS) if player.up[shard])]

    def _deliver(self, peer: int, shard: int) -> None:
        sent = self.players[peer].up[shard].popleft()
        self._carry_out(shard, self.cores[shard].received(peer, sent.message, sent.frames))

    def _kill(self, peer: int) -> None:
        self.players[peer].dead = True
        for shard, core in enumerate(self.cores):
            self._carry_out(shard, core.closed(peer, "connection reset"))

    def _replace(self, peer: int) -> None:
        self.players[peer].dead = True
        for shard, core in enumerate(self.cores):
            self._carry_out(shard, core.interrupted(peer))
        self.start(self.players[peer].rank)

    def _carry_out(self, shard: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Close) and self.players[effect.peer].dead:
                continue
            assert isinstance(effect, Send), effect
            for peer in effect.peers:
                self.players[peer].down[shard].append((effect.message, effect.frames))
