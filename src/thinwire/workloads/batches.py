"""Whose examples come next: an endless, reproducible sequence of batches for one worker.

Strategy: every epoch all workers draw the same permutation from the seed and the epoch's number, and each
takes its own slice: no example goes to two workers, and none twice in an epoch. What does not fill a whole
batch is left out of that epoch. Chance comes from (seed, epoch, rank, step) and not from a running
generator, so the position is the whole state and resuming is exact. It refuses to know of models and rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from thinwire.errors import ConfigError
from thinwire.workloads.dataset import Dataset

PADDING = 4


class Batches(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """An infinite iterator over (inputs, targets) for one worker.

    Args:
        dataset: where examples come from.
        rank: this worker, 0 … workers − 1.
        workers: number of workers that share the data.
        batch: examples per batch and worker.
        seed: the same on every worker.
        augment: random crop and flip (images only).

    Attributes:
        epoch: number of the epoch that the next batch belongs to, from 0.
        index: number of the next batch within its epoch.
        batches_per_epoch: batches that one epoch gives each worker.

    Raises:
        ConfigError: a rank outside the workers, or fewer examples than one batch per worker.

    >>> from thinwire.workloads.data import data
    >>> batches = Batches(data("digits"), rank=0, workers=4, batch=8, seed=0)
    >>> inputs, targets = next(batches)
    >>> inputs.shape, inputs.dtype, targets.shape, targets.dtype, batches.batches_per_epoch
    (torch.Size([8, 1, 8, 8]), torch.float32, torch.Size([8]), torch.int64, 42)
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        rank: int,
        workers: int,
        batch: int,
        seed: int,
        augment: bool = False,
    ) -> None:
        if workers < 1 or not 0 <= rank < workers:
            raise ConfigError(f"rank {rank} of {workers} workers; expected a rank from 0 to workers − 1")
        if batch < 1 or len(dataset.train_x) < workers * batch:
            raise ConfigError(
                f"{workers} workers × {batch} examples a batch do not fit {dataset.name}'s "
                f"{len(dataset.train_x):,} examples: use a batch of 1 to {len(dataset.train_x) // workers}"
            )
        if augment and len(dataset.in_shape) != 3:
            raise ConfigError(f"{dataset.name} holds no images: it cannot be augmented")
        self.dataset = dataset
        self.rank = rank
        self.workers = workers
        self.batch = batch
        self.seed = seed
        self.augment = augment
        self.batches_per_epoch = len(dataset.train_x) // workers // batch
        self.epoch = 0
        self.index = 0
        self._shard = self._draw_shard()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch: inputs (batch, *in_shape) as a model reads them, int64 targets."""
        if self.index == self.batches_per_epoch:
            self.epoch, self.index = self.epoch + 1, 0
            self._shard = self._draw_shard()
        rows = self._shard[self.index * self.batch : (self.index + 1) * self.batch]
        x = self.dataset.train_x[rows]
        if self.augment:
            x = crop_and_flip(x, _generator(self.seed, self.epoch, self.rank + 1, self.index))
        self.index += 1
        return self.dataset.inputs(x), self.dataset.train_y[rows].long()

    def state_dict(self) -> dict[str, Any]:
        """The position, for an exact resume; the same on every worker, and plain JSON."""
        return {
            "dataset": self.dataset.name,
            "num_examples": len(self.dataset.train_x),
            "seed": self.seed,
            "workers": self.workers,
            "batch": self.batch,
            "epoch": self.epoch,
            "index": self.index,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken: the next batch is the one that would have come.

        With another number of workers or another batch size the slices differ, and the rest of the epoch
        cannot be told apart from what was seen: then it continues with the next whole epoch.

        Raises:
            ConfigError: the state belongs to other data or another seed; the position is unchanged.
        """
        mine = self.state_dict()
        for key in ("dataset", "num_examples", "seed"):
            if state.get(key) != mine[key]:
                raise ConfigError(f"the saved batches have {key} {state.get(key)!r}, these have {mine[key]!r}")
        same_slices = all(state[key] == mine[key] for key in ("workers", "batch"))
        self.epoch, self.index = (state["epoch"], state["index"]) if same_slices else (state["epoch"] + 1, 0)
        self._shard = self._draw_shard()

    def advance_to(self, step: int) -> None:
        """Goes on where a worker is after so many batches."""
        self.epoch, self.index = divmod(step, self.batches_per_epoch)
        self._shard = self._draw_shard()

    def _draw_shard(self) -> torch.Tensor:
        """This worker's rows in this epoch, a slice of a permutation that all workers agree on."""
        order = torch.randperm(len(self.dataset.train_x), generator=_generator(self.seed, self.epoch, 0, 0))
        share = len(order) // self.workers
        return order[self.rank * share : (self.rank + 1) * share]


def crop_and_flip(images: torch.Tensor, generator: torch.Generator, padding: int = PADDING) -> torch.Tensor:
    """Crops and flips every image of a batch on its own (He et al., "Deep residual learning", 4.2; 3LC, section 4.3).

    Each is padded on every side, cut back to its size at a random place, and mirrored with probability one half.

    Args:
        images: (batch, channels, height, width), any dtype.
        generator: source of chance, on the CPU; advanced by three draws per batch.
        padding: pixels of zero (black) added on each side before cropping.

    Returns:
        A new tensor of the same shape and dtype.

    >>> pictures = torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32).to(torch.uint8)
    >>> crop_and_flip(pictures, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    batch, _, high, wide = images.shape
    top = torch.randint(0, 2 * padding + 1, (batch, 1), generator=generator)
    left = torch.randint(0, 2 * padding + 1, (batch, 1), generator=generator)
    mirrored = torch.randint(0, 2, (batch, 1), generator=generator).bool()
    rows = top + torch.arange(high)
    columns = torch.arange(wide)
    columns = left + torch.where(mirrored, columns.flip(0), columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    index = torch.arange(batch).view(-1, 1, 1)
    # Indexing with (batch, row, column) and all channels puts the channels last: move them back.
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _generator(*key: int) -> torch.Generator:
    """A generator whose stream depends on all of `key`, well mixed."""
    seed = np.random.SeedSequence([number % (1 << 63) for number in key]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed) >> 1)
