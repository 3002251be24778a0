"""Which buckets travel together, and what a core keeps of a step."""

from __future__ import annotations

import torch

import thinwire as tw
from tests.collective.ranks import collectives, play, step, tensors
from thinwire.collective.core import Bucket, Collective

SIZES = {"a": 500, "bias": 7, "b": 400, "c": 300}
BUCKETS = {name: Bucket(((name, 0),), 4 * size) for name, size in SIZES.items()}


def travel(core: Collective, names: str = "a bias b c") -> list[list[int]]:
    """The first bucket and the number of buckets of each exchange of a step."""
    shown = names.split()
    ready = []
    for index, name in enumerate(shown):
        ready += core.bucket_ready(BUCKETS[name], 0, index, last=index + 1 == len(shown))
    assert [exchange.last for exchange, _ in ready] == [False] * (len(ready) - 1) + [True]
    return [[exchange.bucket, count] for exchange, count in ready]


def test_small_buckets_travel_together_until_they_are_large_enough() -> None:
    for nbytes, expected in (
        (0, [[0, 1], [1, 1], [2, 1], [3, 1]]),
        (2001, [[0, 2], [2, 2]]),
        (2100, [[0, 3], [3, 1]]),
        (10**6, [[0, 4]]),
    ):
        [core, _] = collectives(tensors(tw.codec("3lc"), SIZES), 2, group_nbytes=nbytes)
        assert travel(core) == expected, nbytes
        assert not core.bucket_ready(BUCKETS["bias"], 1, 0, last=False) or not nbytes
        assert travel(core) == expected, "a step that was broken off is forgotten"


def test_skip_of_a_broken_step_does_not_reach_the_next_step() -> None:
    """Residuals of a step that went well must not be restored."""
    cores = collectives(tensors(tw.codec("3lc"), SIZES), 2, skip=True, group_nbytes=0)
    bucket = Bucket((("a", 0),), 4 * SIZES["a"])
    broken = [torch.ones(SIZES["a"]) for _ in cores]
    broken[1][3] = torch.nan
    exchanges = [core.bucket_ready(bucket, 0, 0, last=False)[0][0] for core in cores]
    for core, exchange in zip(cores, exchanges, strict=True):
        core.started(exchange)
    play(exchanges, broken)
    for core, exchange in zip(cores, exchanges, strict=True):
        core.finished(exchange)
    step(cores, bucket, [torch.linspace(-1, 1, SIZES["a"]) for _ in cores], number=1)
    for core in cores:
        assert core.steps_skipped == 0
        assert any(bool(each.residual.any()) for each in core.residuals.contexts.values() if each.residual is not None)
