"""The model's tensors at a worker: each one float32 copy that updates change, partitioned into tables of the shards.

A contiguous float32 tensor is its own copy: deltas are added in place, with no temporary. Any other (half precision,
channels last) gets a float32 copy beside it, so that small deltas are not rounded away and every worker holds the same
bits. Either is on the tensor's device: what is decoded for a tensor on a GPU is written there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from thinwire.codecs import Codec
from thinwire.policies.assignment import Partition
from thinwire.worker.table import WorkerTable


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the model as planned.

    Args:
        name: in the model.
        tensor: the parameter or buffer.
        state: whether it is a buffer.
        up: codec of the pushes.
        placed: its partitions in order, each with the index of its table in the shard's plan.
    """

    name: str
    tensor: torch.Tensor
    state: bool
    up: Codec
    placed: tuple[tuple[Partition, int], ...]


class WorkerTensor:
    """One tensor of the model at a worker: its copy, and the tables that are views of it.

    Args:
        planned: what it is; changed in place, outside autograd.

    Attributes:
        values: float32[n], flat, on the tensor's device; the tensor's own memory where possible.
        tables: one for each partition, in order.
    """

    def __init__(self, planned: PlannedTensor) -> None:
        self.name, self.state, self.parameter = planned.name, planned.state, planned.tensor
        self.tables: list[WorkerTable] = []
        self._shown = planned.tensor.detach()
        self._separate = self._shown.dtype != torch.float32 or not planned.tensor.is_contiguous()
        self.values = self._flat().clone() if self._separate else self._shown.view(-1)

    def read(self) -> None:
        """Takes over the tensor's values, after something else changed them."""
        if self._separate:
            self.values.copy_(self._flat())

    def write(self) -> None:
        """Copies the values to the tensor, where they are separate."""
        if self._separate:
            self._shown.copy_(self.values.view(self._shown.shape))

    def gradients(self) -> Iterator[tuple[WorkerTable, torch.Tensor]]:
        """Each table with its part of the gradient; nothing for a buffer, or without a gradient."""
        if not self.state and self.parameter.grad is not None:
            for table in self.tables:
                yield table, table.part_of(self.parameter.grad)

    def _flat(self) -> torch.Tensor:
        return self._shown.to(torch.float32).contiguous().view(-1)
