"""Goodput of learners that die, in virtual time: a real shard, modelled learners, links and failures.

Goodput is the number of inner steps in the shared parameters, divided by the number that the same learners take without
failures, merges and waits. Learners, links and failures are modelled; the shard is the product's core.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from thinwire.codecs import codec
from thinwire.schema import Contribution, Join, Merged, Offer, Plan, Resume, TableSpec, Values
from thinwire.server.core import ServerCore
from thinwire.server.effects import Close, Effect, Send
from thinwire_lab.bench.harness import Bench, Column, Figures, Tell, column
from thinwire_lab.bench.options import GoodputOptions
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.jobs.virtual_time import Agenda

PLAIN = codec("fp32")
VALUE = PLAIN.encode(np.zeros(1, np.float32))
FRAGMENTS = 3
SPREAD = 0.1
"""Standard deviation of the logarithm of a learner's speed."""
NOTICED_S = 10.0
"""After this time without a connection the server no longer waits for a learner; the server's default."""


@dataclass(frozen=True, kw_only=True)
class GoodputCell:
    """One run: each of its learners dies every `mtbf_s` seconds on average."""

    learners: int
    mtbf_s: float
    restart_s: float
    h: int
    grace_s: float
    seconds: float
    seed: int

    def __str__(self) -> str:
        return f"{self.learners} learners, a failure of each every {self.mtbf_s / 60:g} min, seed {self.seed}"


class GoodputRun(Figures, frozen=True, kw_only=True):
    """Shares of the possible steps, and the longest time without a new version, in seconds."""

    decoupled: float
    in_step: float
    data_parallel: float
    longest_s: float
    failures: int


@dataclass(eq=False)
class Learner:
    """A modelled learner.

    Args:
        rank: its number.
        step_s: seconds of its inner step.

    Attributes:
        life: counts its processes; events of an earlier process do nothing.
        peer: its session.
        began: the time of this process's first step.
        sent: inner steps of its newest contribution to each fragment.
    """

    rank: int
    step_s: float
    life: int = 0
    peer: int = -1
    began: float = 0.0
    sent: list[int] = field(default_factory=lambda: [0] * FRAGMENTS)


class Decoupled:
    """A shard of the product, and modelled learners. One inner step takes one second on average.

    Args:
        cell: the run.
    """

    def __init__(self, cell: GoodputCell) -> None:
        self.cell, self.longest, self.failures = cell, 0.0, 0
        self._agenda, self._peers = Agenda(), itertools.count()
        self._random = random.Random(f"{cell.learners} {cell.mtbf_s} {cell.seed}")
        self._core = ServerCore(min_workers=1)
        self._core.now = self._agenda.now
        self._merged_at, self._merges_at = 0.0, -1.0
        self._versions = [0] * FRAGMENTS
        quorum = f"quorum[k={max(1, cell.learners // 4)},grace={cell.grace_s},h={cell.h}]"
        self._plan = Plan(
            workers=cell.learners,
            tables=tuple(TableSpec(name=f"fragment {each}", shape=(1,)) for each in range(FRAGMENTS)),
            codecs=(PLAIN.config(),),
            optimizer="SGD",
            groups=({"momentum": 0.0},),
            consistency=quorum,
            local=f"fragments={FRAGMENTS}",
        )
        self.learners = [Learner(rank, speed(self._random)) for rank in range(cell.learners)]

    @property
    def time(self) -> float:
        return self._agenda.now()

    def run(self) -> float:
        """Returns the goodput."""
        for learner in self.learners:
            self._join(learner)
        while self._agenda.next_s <= self.cell.seconds:
            self._agenda.advance()
            if (at := self._core.merges_at) is not None and at != self._merges_at:
                self._merges_at = at
                self._agenda.note(max(at, self.time), lambda now_s: self._do(self._core.merge_due()))
        possible = sum(self.cell.seconds / learner.step_s for learner in self.learners)
        return float(np.mean(self._core.state_dict()["steps"]["examples"])) / possible

    def _later(self, learner: Learner, delay: float, event: Callable[[], None]) -> None:
        """Calls an event of a learner's process, unless the process is dead by then."""
        life = learner.life
        self._agenda.call_later(delay, lambda: event() if learner.life == life else None)

    def _join(self, learner: Learner) -> None:
        learner.peer, learner.began, learner.sent = next(self._peers), self.time, [0] * FRAGMENTS
        self._do(self._core.received(learner.peer, Join(rank=learner.rank, plan=self._plan)))
        if not self._core.begun and learner.rank == 0 and self.time == 0:
            tables = tuple(range(FRAGMENTS))
            self._do(self._core.received(learner.peer, Values(tables=tables, versions=(0,) * FRAGMENTS), (VALUE,) * 3))
        first = self.cell.h if self.time else 0  # a learner that returns contributes after h steps
        for fragment in range(FRAGMENTS):
            due = (fragment + 1) * self.cell.h // FRAGMENTS
            self._contribute_at(learner, fragment, due if due >= first else due + self.cell.h)
        self._later(learner, self._random.expovariate(1 / self.cell.mtbf_s), lambda: self._die(learner))

    def _contribute_at(self, learner: Learner, fragment: int, step: int) -> None:
        delay = learner.began + step * learner.step_s - self.time
        self._later(learner, max(0.0, delay), lambda: self._contribute(learner, fragment, step))

    def _contribute(self, learner: Learner, fragment: int, step: int) -> None:
        steps, learner.sent[fragment] = step - learner.sent[fragment], step
        message = Contribution(
            step=step,
            steps=steps,
            examples=float(steps),
            bases=(self._versions[fragment],),
            tables=(fragment,),
            rates=(1.0,),
        )
        self._do(self._core.received(learner.peer, message, (VALUE,)))
        self._contribute_at(learner, fragment, step + self.cell.h)

    def _die(self, learner: Learner) -> None:
        self.failures += 1
        learner.life += 1
        peer = learner.peer
        self._agenda.call_later(NOTICED_S, lambda: self._do(self._core.closed(peer, "it died")))
        self._agenda.call_later(max(NOTICED_S, self.cell.restart_s), lambda: self._join(learner))

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peers, Offer() as offer):
                    for peer in peers:
                        self._do(self._core.received(peer, Resume(step=max(0, offer.begin))))
                case Send(_, Merged() as merged):
                    for table in merged.tables:
                        self._versions[table] = merged.version
                    self.longest = max(self.longest, self.time - self._merged_at)
                    self._merged_at = self.time
                case Close(peer, message) if message is not None:
                    raise RuntimeError(f"session {peer} was refused: {message.reason}")


def speed(chance: random.Random) -> float:
    """Returns the seconds of a learner's inner step."""
    return chance.lognormvariate(0.0, SPREAD)


def in_step(cell: GoodputCell) -> float:
    """Returns the goodput of rounds in which all living learners exchange after h steps, as `diloco` does.

    A round takes as long as the slowest learner takes for h steps. If one dies, the other learners wait until the
    server notices it, and continue without it; it returns in the first round after its restart.
    """
    chance = random.Random(f"in step {cell.learners} {cell.mtbf_s} {cell.seed}")
    paces, time, done = [speed(chance) for _ in range(cell.learners)], 0.0, 0
    back = [0.0] * cell.learners
    while time < cell.seconds:
        here = [rank for rank in range(cell.learners) if back[rank] <= time]
        if not here:
            time = min(back)
            continue
        round_s = cell.h * max(paces[rank] for rank in here)
        died = [rank for rank in here if (life := chance.expovariate(1 / cell.mtbf_s)) < round_s and life > 0]
        for rank in died:
            back[rank] = time + round_s + cell.restart_s
        time += round_s + (NOTICED_S if died else 0.0)
        done += cell.h * (len(here) - len(died))
    return done / sum(time / pace for pace in paces)


def data_parallel(cell: GoodputCell) -> float:
    """Returns the goodput of data-parallel training: any death stops all learners, which return to the last checkpoint.

    The model takes a checkpoint every `h` steps at no cost.
    """
    chance = random.Random(f"data parallel {cell.learners} {cell.mtbf_s} {cell.seed}")
    paces = [speed(chance) for _ in range(cell.learners)]
    pace, time, done = max(paces), 0.0, 0
    while time < cell.seconds:
        life = chance.expovariate(cell.learners / cell.mtbf_s)
        whole = int(min(life, cell.seconds - time) // (cell.h * pace))
        done += whole * cell.h * cell.learners
        time += life + cell.restart_s
    return done / sum(min(time, cell.seconds) / each for each in paces)


@dataclass(kw_only=True)
class GoodputBench(GoodputOptions, Bench[GoodputCell, GoodputRun]):
    """Every number of learners with every mean time between failures."""

    kinds = (GoodputRun,)
    columns: Sequence[Column[GoodputCell, GoodputRun]] = (
        ("learners", lambda cell, _run: f"{cell.learners:,}"),
        ("a learner fails every", lambda cell, _run: f"{cell.mtbf_s / 60:g} min"),
        column("failures", "failures", "{:,}"),
        column("decoupled", "decoupled", "{:.3f}"),
        column("in step", "in_step", "{:.3f}"),
        column("data-parallel", "data_parallel", "{:.3f}"),
        column("longest without a version, s", "longest_s", "{:.1f}"),
    )

    def cells(self) -> list[GoodputCell]:
        return [
            self.filled(GoodputCell, learners=learners, mtbf_s=60 * minutes, seconds=60 * self.minutes)
            for learners in self.learners
            for minutes in self.mtbf_minutes
        ]

    def measure(self, cell: GoodputCell, before: Measured[GoodputCell, GoodputRun], tell: Tell) -> GoodputRun:
        decoupled = Decoupled(cell)
        return GoodputRun(
            decoupled=decoupled.run(),
            in_step=in_step(cell),
            data_parallel=data_parallel(cell),
            longest_s=decoupled.longest,
            failures=decoupled.failures,
        )

    def notes(self, measured: Measured[GoodputCell, GoodputRun]) -> list[str]:
        bounds = sorted({(each.mtbf_s, each.mtbf_s / (each.mtbf_s + each.restart_s)) for each in measured})
        return [
            "modelled, not measured: learners, links and failures; the shard that merges is the product's",
            *(f"learners that fail every {s / 60:g} min are present {share:.1%} of the time" for s, share in bounds),
        ]
