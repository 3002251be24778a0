"""Every example once an epoch, whoever comes and goes; and everybody agrees on whose it is."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.policies.sampling import Memberships, SharedEpochs, extended

EXAMPLES = 103


def epochs(memberships: Memberships, batch: int = 3, seed: int = 0) -> SharedEpochs:
    return SharedEpochs(EXAMPLES, batch=batch, seed=seed, memberships=memberships)


def churn(seed: int, steps: int) -> Memberships:
    """Workers that come and go at random, seldom and often."""
    chance = random.Random(seed)
    memberships: Memberships = ((0, tuple(range(chance.randint(1, 5)))),)
    for step in range(1, steps):
        if chance.random() < (0.02, 0.1, 0.5)[seed % 3]:
            ranks = {rank for rank in range(6) if chance.random() < 0.6}
            memberships = extended(memberships, step, tuple(sorted(ranks)))
    return memberships


def test_undisturbed_the_slices_are_what_they_always_were() -> None:
    def rows(rank: int, workers: int, batch: int, seed: int, step: int) -> list[int]:
        epoch, index = divmod(step, EXAMPLES // workers // batch)
        key = np.random.SeedSequence([seed, epoch, 0, 0]).generate_state(1, np.uint64)[0]
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(int(key) >> 1))
        share = EXAMPLES // workers
        return order[rank * share : (rank + 1) * share][index * batch : (index + 1) * batch].tolist()

    for workers, batch, seed in ((1, 1, 0), (4, 5, 7), (3, 34, 1), (10, 10, 2)):
        shared = epochs(((0, tuple(range(workers))),), batch, seed)
        for step in (0, 1, 2, 7, 30, 31, 4, 200):
            for rank in range(workers):
                assert shared.rows(rank, step).tolist() == rows(rank, workers, batch, seed, step), (workers, step)


def test_fixed_segments_are_a_workers_own_in_every_epoch_and_their_order_is_not() -> None:
    share, batch = EXAMPLES // 4, 5
    shared = SharedEpochs(EXAMPLES, batch=batch, seed=7, memberships=((0, (0, 1, 2, 3)),), segments="fixed")
    read = [[shared.rows(rank, step).tolist() for step in range(40 * (share // batch))] for rank in range(4)]
    seen = [set(itertools.chain(*own)) for own in read]
    assert [len(own) for own in seen] == [share] * 4, "40 epochs take each once, but for what fills no batch"
    assert len(set.union(*seen)) == 4 * share
    for own in read:
        epochs = [tuple(itertools.chain(*own[at : at + share // batch])) for at in range(0, len(own), share // batch)]
        assert all(len({*epoch}) == len(epoch) for epoch in epochs)
        assert len({*epochs}) == 40
    assert shared.rows(2, 8).tolist() == read[2][8], "a position is a step"


def test_no_example_comes_twice_in_an_epoch_and_hardly_any_is_left_out() -> None:
    for seed in range(9):
        memberships, batch = churn(seed, 150), 3
        shared, read = epochs(memberships, batch, seed), dict[int, list[int]]()
        ranks: tuple[int, ...] = ()
        for step in range(150):
            ranks = dict(memberships).get(step, ranks)
            for rank in ranks:
                rows = shared.rows(rank, step).tolist()
                read.setdefault(shared.epoch, []).extend(rows)
        assert len(read) > 3, seed
        for epoch, examples in list(read.items())[:-1]:
            assert len(set(examples)) == len(examples), (seed, epoch)
            assert len(examples) > EXAMPLES - 6 * batch, (seed, epoch, "what is left fills no batch for each of them")


def test_a_position_is_a_step_however_one_came_there() -> None:
    for seed in range(6):
        memberships = churn(seed, 120)
        walking, jumping, growing = epochs(memberships), epochs(memberships), epochs(memberships[:1])
        walked: dict[int, list[int]] = {}
        for step in range(130):
            known = tuple(each for each in memberships if each[0] <= step)
            rank = known[-1][1][-1]
            walked[step] = walking.rows(rank, step).tolist()
            if growing.memberships != known:  # hears of each change just in time
                growing.follow(known)
            assert growing.rows(rank, step).tolist() == walked[step], (seed, step)
        for step in random.Random(seed).sample(range(130), 40):
            rank = max(each for each in memberships if each[0] <= step)[1][-1]
            assert jumping.rows(rank, step).tolist() == walked[step], (seed, step)


def test_newcomers_and_more_workers_than_batches_draw_at_random() -> None:
    shared = epochs(((0, (0, 1)), (9, (0, 1, 4))))
    early = shared.rows(4, 7)
    assert len(early) == 3 and shared.rows(4, 7).tolist() == early.tolist() != shared.rows(4, 8).tolist()
    assert not set(shared.rows(4, 9).tolist()) & {*shared.rows(0, 9).tolist(), *shared.rows(1, 9).tolist()}
    with pytest.raises(ConfigError, match="rank 2"):
        shared.rows(2, 9)
    shared = epochs(((0, (0,)), (2, tuple(range(9))), (5, (0, 1))), batch=12)
    assert len(shared.rows(8, 3)) == 12 and len(shared.rows(1, 40)) == 12
    with pytest.raises(ConfigError, match="9 workers × 12 examples"):
        epochs(((0, tuple(range(9))),), batch=12)
