"""Workers' batches are disjoint, epochs reshuffle, and resuming is exact."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.dataset import Dataset
from thinwire_lab.workloads.images import digits


@pytest.fixture(scope="module")
def numbered() -> Dataset:
    """103 pictures, each of which carries its own number as its label and its pixels."""
    numbers = torch.arange(103, dtype=torch.uint8)
    pixels = numbers.view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous()
    zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    return replace(digits(), train_x=pixels, train_y=numbers, num_classes=103, mean=zero, std=one)


def _epoch(dataset: Dataset, rank: int, workers: int, batch: int, epoch: int = 0, seed: int = 0) -> list[int]:
    batches = Batches(dataset, rank=rank, workers=workers, batch=batch, seed=seed)
    for _ in range(epoch * batches.batches_per_epoch):
        next(batches)
    return [int(label) for _ in range(batches.batches_per_epoch) for label in next(batches)[1]]


def test_batches_use_each_example_once_in_an_epoch(numbered: Dataset) -> None:
    for workers, batch in [(1, 1), (4, 5), (3, 34), (10, 10)]:
        for epoch in (0, 1, 5):
            shards = [_epoch(numbered, rank, workers, batch, epoch) for rank in range(workers)]
            everything = [example for shard in shards for example in shard]
            assert len(set(everything)) == len(everything)
            assert len(everything) == 103 // workers // batch * batch * workers


def _take(batches: Batches, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [next(batches) for _ in range(count)]


def test_batches_resume_exactly(numbered: Dataset) -> None:
    for augment, before in itertools.product((False, True), (0, 3, 5, 12)):
        four = [Batches(numbered, rank=rank, workers=4, batch=5, seed=7, augment=augment) for rank in (2, 2, 0)]
        original, resumed, other_rank = four
        _take(original, before)
        state = json.loads(json.dumps(original.state_dict()))
        expected = _take(original, 11)
        resumed.load_state_dict(state)
        for (x, y), (expected_x, expected_y) in zip(_take(resumed, 11), expected, strict=True):
            assert torch.equal(x, expected_x) and torch.equal(y, expected_y), (augment, before)
        _take(other_rank, before)
        assert other_rank.state_dict() == state, "one worker's position serves all"


def test_batches_of_other_workers_continue_with_the_next_epoch(numbered: Dataset) -> None:
    four = Batches(numbered, rank=0, workers=4, batch=5, seed=7)
    _take(four, 7)
    two = Batches(numbered, rank=0, workers=2, batch=5, seed=7)
    two.load_state_dict(four.state_dict())
    assert two.step == 2 * two.batches_per_epoch
    assert [int(label) for label in next(two)[1]] == _epoch(numbered, 0, 2, 5, epoch=2, seed=7)[:5]


def test_batches_foreign_state_raises_config_error(numbered: Dataset) -> None:
    batches = Batches(numbered, rank=0, workers=4, batch=5, seed=7)
    _take(batches, 2)
    for key, value in (("dataset", "mnist"), ("num_examples", 60_000), ("seed", 8), ("segments", "fixed")):
        with pytest.raises(ConfigError, match=f"saved batches have {key} "):
            batches.load_state_dict({**batches.state_dict(), key: value, "epoch": 9})
        assert batches.step == 2


def test_augmented_batches_differ_by_worker_epoch_and_step() -> None:
    dataset = digits()
    plain = Batches(dataset, rank=0, workers=1, batch=1347, seed=0)
    augmented, again = (Batches(dataset, rank=0, workers=1, batch=1347, seed=0, augment=True) for _ in range(2))
    (x, y), (augmented_x, augmented_y), (again_x, _) = next(plain), next(augmented), next(again)
    assert torch.equal(y, augmented_y) and torch.equal(augmented_x, again_x)
    assert not torch.equal(x, augmented_x)
