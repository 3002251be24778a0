"""The faults of a storm by name, when each of them occurs, and the options of storms. A seed decides the storm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

# kill: a worker is killed (SIGKILL), and the same command starts again at once
# gone: a worker is killed and does not return; backup workers replace it
# stop: a worker is frozen (SIGSTOP) and continues later (SIGCONT)
# throttle: a worker computes for a third of the time, for some seconds
# cut, cut-out, cut-in: a worker's link passes no packet for some seconds: both ways, outwards, inwards
# slow: a worker's link has a tenth of its rate for some seconds
# server: the server is killed, and starts again with --resume
KINDS = ("kill", "gone", "stop", "throttle", "cut", "cut-out", "cut-in", "slow", "server")

WITHOUT_PRIVILEGES = ("kill", "gone", "stop", "throttle", "server")  # these need no link that the kernel shapes
DURATIONS_S = {"stop": (0.5, 4.0), "cut": (0.5, 3.0), "cut-out": (0.5, 3.0), "cut-in": (0.5, 3.0)}
DURATIONS_S |= {"slow": (1.0, 5.0), "throttle": (3.0, 10.0)}


@dataclass(kw_only=True)
class StormsOptions:
    """The options of storms; `cli.options` describes them."""

    runs: int = 100
    first: int = 0
    seed: int = 0
    model: str = "mlp"
    data: str = "digits"
    workers: int = 3
    link: str = "10mbit"
    shaping: str = "auto"
    fork: bool = True
    worker_grace_s: float = 10.0
    designs: Sequence[str] = ()
    consistency: str | None = None
    steps: int = 120
    faults: Sequence[str] = ("kill", "stop", "cut", "cut-out", "cut-in", "slow", "server")
    every: int = 12
    strikes: int | None = None
    peace: bool = False
    checkpoint_every: int = 10
    points: float = 5.0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault."""

    round: int  # the update before which it occurs
    kind: str  # one of `KINDS`
    rank: int  # the worker that it hits, unless it hits the server
    seconds: float = 0.0  # how long it lasts; 0 where it has no length

    def __str__(self) -> str:
        target = "" if self.kind == "server" else f" worker {self.rank}"
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{target}{lasts} at {self.round}"


def draw(seed: str, kinds: Sequence[str], *, workers: int, every: int, rounds: int) -> list[Fault]:
    """Draws a storm: a fault every `every` rounds. The last sixth has none, so that every worker can return."""
    chance = random.Random(seed)
    return [
        _fault(chance, at, chance.choice(list(kinds)), chance.randrange(workers))
        for at in range(every, rounds - rounds // 6 + 1, every)
    ]


def scatter(seed: str, kinds: Sequence[str], *, workers: int, strikes: int, first: int, rounds: int) -> list[Fault]:
    """Draws a few faults between a tenth and six tenths of a training, each on another worker."""
    chance = random.Random(seed)
    at = sorted(first + round((rounds - first) * (0.1 + 0.5 * chance.random())) for _ in range(strikes))
    ranks = chance.sample(range(workers), workers)
    return [_fault(chance, each, chance.choice(list(kinds)), ranks[place % workers]) for place, each in enumerate(at)]


def _fault(chance: random.Random, at: int, kind: str, rank: int) -> Fault:
    least, most = DURATIONS_S.get(kind, (0.0, 0.0))
    return Fault(round=at, kind=kind, rank=rank, seconds=round(chance.uniform(least, most), 1))
