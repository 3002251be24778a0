"""What strangers say: packets that no worker of ours sends, and copies of those that one has sent."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from thinwire.packets import pack
from thinwire.schema import Acknowledged, Join, Leave, Plan, Push, Scalars, SessionOpen, Values

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess


def hostile_packets(chance: Random, plan: Plan, workers: list[WorkerProcess]) -> list[bytes]:
    """Returns what one stranger says, in order; it knows the plan, and no worker's session name."""
    good = pack(Join(rank=0, plan=plan))
    other = msgspec.structs.replace(plan, workers=plan.workers + 1)
    kinds: list[list[bytes]] = [
        [chance.randbytes(chance.randint(1, 200))],
        [good[: chance.randint(1, len(good) - 1)]],
        [_damaged(chance, good)],
        [pack(Push(step=0, tables=(0,), rates=(0.1,)), (b"",))],
        [pack(Values(tables=(0,), versions=(0,)), (b"",))],
        [pack(Leave())],
        [pack(Scalars(step=0, values=(1.0,)))],
        [pack(Join(rank=0, plan=other))],
        [pack(Join(rank=plan.workers + 5000, plan=plan))],
        [pack(Acknowledged(count=1 << 40))],
        [pack(SessionOpen(session="stranger", received=5, acknowledged=5))],
        [pack(SessionOpen(session="x" * 100))],
        [pack(SessionOpen(session="a guess")), pack(SessionOpen(session="a guess"))],
        [pack(SessionOpen(session="a guess")), pack(Acknowledged(count=-1))],
        [pack(SessionOpen(session="idle"))],
        [b"TP\x02\xff" + bytes(16)],
    ]
    return chance.choice(kinds)


def _damaged(chance: Random, packet: bytes) -> bytes:
    """A packet with one byte changed, in its head or the plan's first bytes, which always shows."""
    at = chance.randrange(0, 4)
    return packet[:at] + bytes([packet[at] ^ chance.randint(1, 255)]) + packet[at + 1 :]
