"""Who owned the slices in a saved state: kept in one number with how often each was encoded.

A residual counts by 1/ranks in the average, its owner's in full; and who owns a small tensor depends on all the others.
A state with one more key could not be filled from a checkpoint of before by `torch.distributed.checkpoint`, and states
of before have 0 where the owner is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from thinwire.errors import ConfigError
from thinwire.policies.assignment import Partition

_BITS = 40
"""For the count: a run that encodes a thousand times a second reaches it after 34 years."""


def with_owners(counts: Sequence[int], parts: Sequence[Partition]) -> torch.Tensor:
    """Returns the numbers of a tensor's slices, to be saved.

    Args:
        counts: how often each slice was encoded.
        parts: the slices.

    >>> saved = with_owners([3], [Partition(1, 0, 40)])
    >>> counts_of(saved), owned([Partition(0, 0, 40)], saved)
    ([3], (Partition(server=1, start=0, stop=40),))
    """
    numbers = [count | part.server + 1 << _BITS for count, part in zip(counts, parts, strict=True)]
    return torch.tensor(numbers, device="cpu")


def counts_of(saved: torch.Tensor) -> list[int]:
    """Returns how often each slice was encoded."""
    return [number & (1 << _BITS) - 1 for number in saved.tolist()]


def owned(parts: Sequence[Partition], saved: torch.Tensor) -> tuple[Partition, ...]:
    """Returns slices with the owners that a state names; one of before names none, and `parts` stand as they are.

    Raises:
        ConfigError: the state is of another number of slices.
    """
    if saved.numel() != len(parts):
        raise ConfigError(
            f"the state is damaged, or of other slices: it has {saved.numel()} slices of a tensor that was in "
            f"{len(parts)}; take another file of that step, or a state that this version has saved"
        )
    owners = [number >> _BITS for number in saved.tolist()]
    return tuple(
        replace(part, server=owner - 1) if owner > 0 else part for part, owner in zip(parts, owners, strict=True)
    )
