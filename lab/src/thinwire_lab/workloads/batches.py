"""The batches of one worker: an endless, reproducible sequence.

`policies/sampling.py` chooses their rows; an epoch leaves out rows that do not fill a batch. Random numbers depend on
(seed, epoch, rank, step): the position is the whole state, and resuming is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from thinwire.errors import ConfigError
from thinwire.policies.sampling import Memberships, Segments, SharedEpochs, generator
from thinwire_lab.workloads.augment import crop_and_flip, distort
from thinwire_lab.workloads.dataset import Dataset


class Batches(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """An infinite iterator over (inputs, targets) for one worker."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        rank: int,
        workers: int,
        batch: int,
        seed: int,
        augment: bool = False,
        segments: Segments = "drawn",
    ) -> None:
        if workers < 1 or rank < 0:
            raise ConfigError(f"rank {rank} of {workers} workers; expected a rank from 0 to workers − 1")
        if augment and len(dataset.in_shape) != 3:
            raise ConfigError(f"{dataset.name} holds no images: it cannot be augmented")
        self.dataset, self.rank, self.workers, self.batch = dataset, rank, workers, batch
        self.seed, self.augment, self.segments = seed, augment, segments
        first = ((0, tuple(range(workers))),)
        self._shared = SharedEpochs(
            len(dataset.train_x), batch=batch, seed=seed, memberships=first, name=dataset.name, segments=segments
        )
        self.batches_per_epoch = len(dataset.train_x) // workers // batch
        self.step = 0  # number of the next batch, from 0

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the next batch: a model's inputs (batch, *in_shape) and int64 targets."""
        rows = self._shared.rows(self.rank, self.step)
        x = self.dataset.train_x[rows]
        if self.augment:
            chance = generator(self.seed, self._shared.epoch, self.rank + 1, self._shared.index)
            side = self.dataset.crop
            x = crop_and_flip(x, chance) if side is None else distort(x, side, chance)
        self.step += 1
        return self.dataset.inputs(x), self.dataset.train_y[rows].long()

    def follow(self, memberships: Memberships, step: int) -> None:
        """Sets the position to a step, with the memberships of workers by step."""
        if memberships != self._shared.memberships:
            self._shared.follow(memberships)
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, for an exact resume; it is equal on all workers, and plain JSON."""
        epoch = max(0, self.step - 1) // self.batches_per_epoch
        return {
            "dataset": self.dataset.name,
            "num_examples": len(self.dataset.train_x),
            "seed": self.seed,
            "segments": self.segments,
            "workers": self.workers,
            "batch": self.batch,
            "epoch": epoch,
            "index": self.step - epoch * self.batches_per_epoch,
            "memberships": [[step, list(ranks)] for step, ranks in self._shared.memberships],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the position of `state`.

        With another number of workers or another batch size the slices differ. Then it continues with the next whole
        epoch.
        """
        mine = self.state_dict()
        for key in ("dataset", "num_examples", "seed", "segments"):
            if state[key] != mine[key]:
                raise ConfigError(f"the saved batches have {key} {state[key]!r}, these have {mine[key]!r}")
        if all(state[key] == mine[key] for key in ("workers", "batch")):
            saved = tuple((step, tuple(ranks)) for step, ranks in state["memberships"])
            self.follow(saved, state["epoch"] * self.batches_per_epoch + state["index"])
        else:
            self.step = (state["epoch"] + 1) * self.batches_per_epoch
