"""A shard that was given buffers and no parameter: it relays, and has nothing to update."""

from __future__ import annotations

import numpy as np

from tests.server.conversation import PLAIN, Shard
from thinwire.schema import Leave, Plan, Push, TableSpec

PLAN = Plan(
    workers=2,
    tables=(TableSpec(name="mean", shape=(8, 5), state=True),),
    codecs=(PLAIN.config(),),
    optimizer="SGD",
    groups=({},),
)


def test_buffers_are_relayed() -> None:
    shard = Shard(PLAN)
    for step in (0, 50, 100):
        frame = PLAIN.encode(np.full((8, 5), step, np.float32))
        shard.say(0, Push(step=step, tables=(0,), rates=(0.1,)), (frame,))
        assert shard.deltas(1)[0, step + 1] == frame
    for rank in (0, 1):
        shard.say(rank, Leave())
    assert shard.core.finished and shard.core.failed is None


def test_steps_run_forward_and_stay_numbers_that_travel() -> None:
    for step in (-1, 49, 2**62, 2**64 - 1):
        shard = Shard(PLAN)
        for said in (50, step):
            frame = PLAIN.encode(np.zeros((8, 5), np.float32))
            shard.say(0, Push(step=said, tables=(0,), rates=(0.1,)), (frame,))
        assert f"buffer 'mean' of step {step} came between 51 and" in str(shard.core.failed)
