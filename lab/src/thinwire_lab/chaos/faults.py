"""The faults of a storm by name, and when each of them strikes. One seed, one storm."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

KINDS = {
    "kill": "a worker is killed (SIGKILL), and the same command started again at once",
    "gone": "a worker is killed for good, and backup workers make up for it",
    "stop": "a worker is frozen (SIGSTOP) and goes on later (SIGCONT)",
    "throttle": "a worker computes for a third of the time, for a while",
    "cut": "nothing passes a worker's link for a while, either way",
    "cut-out": "nothing that a worker sends arrives for a while",
    "cut-in": "nothing arrives at a worker for a while",
    "slow": "a worker's link has a tenth of its rate for a while",
    "garbage": "a stranger talks nonsense to the server",
    "disk": "there is no room for checkpoints for a while",
    "server": "the server is killed, and started again with --resume",
}
"""Names and meanings."""

# what does not need links that the kernel shapes
WITHOUT_PRIVILEGES = ("kill", "gone", "stop", "throttle", "garbage", "server")
OF_A_WORKER = ("kill", "gone", "stop", "throttle", "cut", "cut-out", "cut-in", "slow")
RETURNING = tuple(kind for kind in OF_A_WORKER if kind != "gone")  # one worker is away and takes part again
OF_THE_SERVER = {"server", "disk"}  # faults that need checkpoints
EXACT = {"garbage", *OF_THE_SERVER}  # faults that strike no worker: weights stay those of an undisturbed training
DURATIONS_S = {"stop": (0.5, 4.0), "cut": (0.5, 3.0), "cut-out": (0.5, 3.0), "cut-in": (0.5, 3.0)}
DURATIONS_S |= {"slow": (1.0, 5.0), "disk": (1.0, 4.0), "throttle": (3.0, 10.0)}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong."""

    round: int  # the update before which it strikes
    kind: str  # a key of `KINDS`
    rank: int  # the worker that it strikes; of others a number at random
    seconds: float = 0.0  # how long it lasts; 0 where it has no length

    def __str__(self) -> str:
        whose = f" worker {self.rank}" if self.kind in OF_A_WORKER else ""
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{whose}{lasts} at {self.round}"


def draw(seed: str, kinds: Sequence[str], *, workers: int, every: int, rounds: int) -> list[Fault]:
    """Draws a storm: a fault after every so many rounds, up to where those who were struck can still be back."""
    chance = random.Random(seed)
    return [
        _fault(chance, at, chance.choice(list(kinds)), chance.randrange(workers))
        for at in range(every, rounds - rounds // 6 + 1, every)
    ]


def scatter(seed: str, kinds: Sequence[str], *, workers: int, strikes: int, first: int, rounds: int) -> list[Fault]:
    """Draws a few faults between a tenth and six tenths of a training; one that dies for good dies once."""
    chance = random.Random(seed)
    at = sorted(first + round((rounds - first) * (0.1 + 0.5 * chance.random())) for _ in range(strikes))
    ranks = chance.sample(range(workers), workers)
    return [_fault(chance, each, chance.choice(list(kinds)), ranks[place % workers]) for place, each in enumerate(at)]


def _fault(chance: random.Random, at: int, kind: str, rank: int) -> Fault:
    least, most = DURATIONS_S.get(kind, (0.0, 0.0))
    return Fault(round=at, kind=kind, rank=rank, seconds=round(chance.uniform(least, most), 1))
