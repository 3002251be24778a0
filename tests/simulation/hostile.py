"""What strangers say: packets that no worker of ours sends, and copies of those that one has sent."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from thinwire.packets import EncodedTensor, pack
from thinwire.schema import Acknowledged, Contribution, Join, Leave, Plan, Push, Scalars, SessionOpen, Values

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


def bad_contribution(
    chance: Random, good: Contribution, frames: tuple[EncodedTensor, ...], before: Contribution | None, h: int
) -> tuple[str, dict[str, Any]]:
    """Returns how a contribution that follows another one may be made a bad one, and what its refusal says."""
    bad: list[tuple[str, dict[str, Any]]] = [
        ("never published", {"bases": tuple(each + 99 for each in good.bases)}),
        ("tables", {"tables": tuple(each + 99 for each in good.tables)}),
        ("learning rates", {"rates": (*good.rates, 1.0)}),
    ]
    if all(len(frame) for frame in frames):
        bad += [("examples", {"examples": wrong}) for wrong in (0.0, -1.0, math.nan, math.inf)]
        if before is not None and h > 1:
            bad.append(("inner steps lie between", {"step": before.step + h - 1, "ended": False}))
    return chance.choice(bad)
