"""A shard whose workers have lost another one: what it has kept, and what they say to go back."""

from __future__ import annotations

from typing import Any

from tests.server.conversation import Shard, make_plan
from thinwire.schema import Join, Leave, Message

BACK = Leave(returning=True)


def kept(*steps: int, min_workers: int | None = None) -> tuple[Shard, dict[int, dict[str, Any]]]:
    """A shard that has trained to step 5, and its states of some steps."""
    shard = Shard(make_plan(state=True), min_workers=min_workers)
    states: dict[int, dict[str, Any]] = {}
    shard.core.checkpoints = states
    for step in range(5):
        if step in steps:
            states[step] = shard.core.state_dict()
        shard.step(step)
    return shard, states


def vote(shard: Shard, peer: int, steps: tuple[int, ...]) -> None:
    shard.say(peer, Join(rank=peer % 10, plan=shard.plan, steps=steps))


def last(shard: Shard, peer: int) -> Message | None:
    return shard.told[peer][-1][0] if shard.told[peer] else None


def lost(shard: Shard, peer: int) -> bool:
    """Whether a peer was told to join again."""
    return shard.ended.get(peer) == "the workers go back to an earlier step"
