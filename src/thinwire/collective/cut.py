"""A tensor cut along one dimension among ranks, and such ranks' unsent values as whole tensors.

Where ranks hold shards of the parameters (FSDP), a residual is of a shard, or of all shards, and another number of
ranks has other shards. A value that is still to be added to the averaged gradient belongs to the parameter, not to the
rank that holds it: the shards' residuals are therefore joined by parameter name, and cut again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from thinwire.collective.residuals import Float64Array, check_state, outstanding
from thinwire.collective.trained import TrainedTensor
from thinwire.policies.assignment import Partition


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of a tensor into shards of equal length along a dimension; the last ones may be shorter or empty.

    Args:
        shape: of the whole tensor.
        dim: the dimension of the cut.

    Example:
        >>> [Cut((5, 3), 0).rows(4, shard) for shard in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """

    shape: tuple[int, ...]
    dim: int

    def rows(self, shards: int, shard: int) -> tuple[int, int]:
        """Returns the start and the end of a shard along the dimension."""
        length, most = self.shape[self.dim], math.ceil(self.shape[self.dim] / shards)
        return min(shard * most, length), min((shard + 1) * most, length)

    def shape_of(self, shards: int, shard: int) -> tuple[int, ...]:
        """Returns the shape of a shard."""
        begin, end = self.rows(shards, shard)
        return (*self.shape[: self.dim], end - begin, *self.shape[self.dim + 1 :])

    def numel(self, shards: int, shard: int) -> int:
        """Returns the number of values of a shard."""
        return math.prod(self.shape_of(shards, shard))

    def of(self, whole: Float64Array, shards: int, shard: int) -> Float64Array:
        """Returns a shard of the whole tensor, as a view."""
        begin, end = self.rows(shards, shard)
        view: Float64Array = whole[(slice(None),) * self.dim + (slice(begin, end),)]
        return view

    def partitions(self, shards: int) -> tuple[Partition, ...]:
        """Returns the partitions of ranks that each own their shard; values are counted shard after shard."""
        found, at = [], 0
        for shard in range(shards):
            if count := self.numel(shards, shard):
                found.append(Partition(shard, at, at + count))
                at += count
        return tuple(found)


def whole_outstanding(
    tensors: Sequence[TrainedTensor],
    cuts: Mapping[str, Cut],
    states: Sequence[Mapping[str, Any]],
    *,
    replicas: int | None,
) -> dict[str, Float64Array]:
    """Returns the values that a run has still to add to the averaged gradient, as whole tensors by name.

    Args:
        tensors: whole, in an order that all ranks share.
        cuts: of each of them.
        states: the `state_dict` of every rank's residuals: the shards of the first replica, then of the next.
        replicas: number of ranks that held each shard and averaged it; None where its only holder averaged it.

    Raises:
        ConfigError: a state that does not fit.
    """
    shards = len(states) // (replicas or 1)
    wholes = {
        tensor.name: np.zeros(cuts[tensor.name].shape, np.float64) for tensor in tensors if not tensor.uncompressed
    }
    if replicas is None:
        partitions = {tensor.name: cuts[tensor.name].partitions(shards) for tensor in tensors}
        for state in states:
            check_state(tensors, state)
        for name, total in outstanding(tensors, states, mean=True, partitions=partitions).items():
            for part in partitions[name]:
                shard = cuts[name].of(wholes[name], shards, part.server)
                shard[...] = total[part.start : part.stop].reshape(shard.shape)
        return wholes
    for index in range(shards):
        own = shards_of(tensors, cuts, shards, index)
        column = states[index::shards]
        for state in column:
            check_state(own, state)
        for name, total in outstanding(own, column, mean=True).items():
            shard = cuts[name].of(wholes[name], shards, index)
            shard[...] = total.reshape(shard.shape)
    return wholes


def shards_of(
    tensors: Sequence[TrainedTensor], cuts: Mapping[str, Cut], shards: int, shard: int
) -> list[TrainedTensor]:
    """Returns the shards of tensors as separate tensors, without empty ones."""
    sized = [replace(tensor, numel=cuts[tensor.name].numel(shards, shard)) for tensor in tensors]
    return [tensor for tensor in sized if tensor.numel]
