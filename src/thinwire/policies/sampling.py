"""Which examples a worker reads at a step: a function of the seed and of who took part from which step on.

Every epoch all workers draw the same permutation from the seed and the epoch's number, and each takes its own slice; or
the slices are the same in all epochs, and only their order is drawn. When the membership changes, the rest of the
slices is divided anew, in the same epoch, among those who take part from then on. No random generator runs on, so all
workers agree without a message, and a position is a step.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, TypeAlias

import numpy as np
import torch

from thinwire.errors import ConfigError

Memberships: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Who takes part, and from which step (or clock) on: pairs of both, in order. The first pass over the data begins with
the first of them."""

Segments: TypeAlias = Literal["drawn", "fixed"]
"""Whether a worker's part of the data is drawn anew each epoch, or the same in all of them."""

MAX_MEMBERSHIPS = 256
"""A training without an end forgets older ones, and begins a new pass over the data."""


def extended(memberships: Memberships, step: int, ranks: tuple[int, ...]) -> Memberships:
    """Returns the memberships with those who take part from `step` on, in place of a former change at that step.

    Workers that hear of the same changes in the same order have the same memberships.

    >>> extended(((0, (0, 1, 2)),), 7, (0, 2))
    ((0, (0, 1, 2)), (7, (0, 2)))
    >>> extended(((0, (0, 1, 2)), (7, (0, 2))), 7, (0, 1, 2))  # it was back at once
    ((0, (0, 1, 2)),)
    """
    kept = tuple(each for each in memberships if each[0] < step)
    if not ranks or (kept and kept[-1][1] == ranks):
        return kept if ranks else memberships
    return ((step, ranks),) if len(kept) >= MAX_MEMBERSHIPS else (*kept, (step, ranks))


class SharedEpochs:
    """Every worker's examples, epoch by epoch.

    Args:
        num_examples: of the data.
        batch: examples per worker and step.
        seed: the same on every worker.
        memberships: who takes part from which step on.
        name: of the data, for messages.
        segments: `fixed` gives a worker the same examples in every epoch that begins with the same workers (Øland &
            Raj, §2: "an exclusive segment of the dataset"), each time in another order.

    Attributes:
        epoch: number of the epoch of the last `rows`, from 0.
        index: of its step within that epoch.

    Raises:
        ConfigError: fewer examples than one batch for each of the first workers.

    Example:
        >>> shared = SharedEpochs(10, batch=2, seed=0, memberships=((0, (0, 1)), (1, (0, 1, 2))))
        >>> first = [shared.rows(rank, 0).tolist() for rank in (0, 1)]
        >>> then = [shared.rows(rank, 1).tolist() for rank in (0, 1, 2)]
        >>> sorted(sum(first + then, [])), shared.epoch
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 0)
    """

    def __init__(
        self,
        num_examples: int,
        *,
        batch: int,
        seed: int,
        memberships: Memberships,
        name: str = "the data",
        segments: Segments = "drawn",
    ) -> None:
        workers = len(memberships[0][1])
        if batch < 1 or num_examples < workers * batch:
            most = num_examples // workers
            raise ConfigError(
                f"{workers} workers × {batch} examples a batch do not fit {name}'s {num_examples:,} examples: "
                + (f"use a batch of 1 to {most}" if most else f"there is one for each of {num_examples:,} workers")
            )
        self._num_examples, self._batch, self._seed, self._segments = num_examples, batch, seed, segments
        self._drawn: tuple[tuple[int, ...], torch.Tensor] | None = None
        self.follow(memberships)

    def follow(self, memberships: Memberships) -> None:
        """From now on these memberships decide."""
        self.memberships = memberships
        (since, self._ranks), *changes = memberships
        self._changes = deque(changes)
        self.epoch = self.index = 0
        self._begin_epoch(since)

    def rows(self, rank: int, step: int) -> torch.Tensor:
        """Returns the numbers of a worker's examples at a step.

        A worker that pushes already, and is not among those who divide the data yet, draws at random from all of it. So
        do all where there are more workers than batches.

        Raises:
            ConfigError: a rank that takes no part.
        """
        self._go_to(step)
        if rank not in self._ranks or step < self._since or not self._steps:
            if not any(rank in ranks for _, ranks in self.memberships):
                raise ConfigError(f"rank {rank} of {len(self._ranks)} workers: it takes no part in this training")
            chance = generator(self._seed, self.epoch, rank + 1, self.index, 1)
            return torch.randint(self._num_examples, (self._batch,), generator=chance, device="cpu")
        first = self._ranks.index(rank) * self._share + (step - self._since) * self._batch
        return self._order[first : first + self._batch]

    # ---- where the workers are: from step `_since` on `_ranks` divide what there is, which lasts for `_steps` steps

    def _go_to(self, step: int) -> None:
        if step < self._since:
            self.follow(self.memberships)
        while True:
            end = self._since + self._steps
            change = self._changes[0][0] if self._changes else None
            if change is not None and change <= step and (change < end or not self._steps):
                self._divide_anew()
            elif self._steps and end <= step:
                last = step if change is None else min(step, change)
                epochs = (last - self._since) // self._steps if self._remaining is None else 1
                self.epoch += epochs
                self._begin_epoch(self._since + epochs * self._steps)
            else:
                break
        self.index = step - self._first

    def _begin_epoch(self, step: int) -> None:
        self._first = step
        self._remaining: torch.Tensor | None = None
        self._divide(step, self._num_examples)

    def _divide(self, step: int, count: int) -> None:
        self._since, self._share = step, count // len(self._ranks)
        self._steps = self._share // self._batch

    def _divide_anew(self) -> None:
        """The next change: what was not handed out in this epoch is divided among those who take part then."""
        step, ranks = self._changes.popleft()
        order, workers = self._order, len(self._ranks)
        slices = order[: self._share * workers].view(workers, self._share)
        read = (step - self._since) * self._batch if self._steps else 0
        left = torch.cat([slices[:, read:].reshape(-1), order[self._share * workers :]])
        self._ranks = ranks
        if len(left) < len(ranks) * self._batch:
            self.epoch += 1
            self._begin_epoch(step)
        else:
            self._remaining = left
            self._divide(step, len(left))

    @property
    def _order(self) -> torch.Tensor:
        """The rows that are divided: of the whole epoch, or what remained of it."""
        if self._remaining is not None:
            return self._remaining
        # The last number tells passes over the data apart, where a former one was forgotten.
        key = self._seed, self.epoch, 0, self.memberships[0][0]
        if self._drawn is None or self._drawn[0] != (*key, self._share):
            self._drawn = (*key, self._share), self._draw(generator(*key))
        return self._drawn[1]

    def _draw(self, chance: torch.Generator) -> torch.Tensor:
        """The rows of a whole epoch, the workers' slices one after the other."""
        if self._segments == "drawn":
            return torch.randperm(self._num_examples, generator=chance, device="cpu")
        rows = torch.randperm(self._num_examples, generator=generator(self._seed, 0, 0, 0), device="cpu")
        divided = rows[: self._share * len(self._ranks)].view(len(self._ranks), self._share)
        within = torch.randperm(self._share, generator=chance, device="cpu")
        return torch.cat([divided[:, within].reshape(-1), rows[divided.numel() :]])


def generator(*key: int) -> torch.Generator:
    """Returns a random generator whose stream depends on all of `key`, well mixed."""
    seed = np.random.SeedSequence([number % (1 << 63) for number in key]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed) >> 1)
