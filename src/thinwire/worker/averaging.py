"""An exponential moving average of a worker's tensors, for evaluation beside the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thinwire.worker.tensor import WorkerTensor


class WeightAverage:
    """average ← decay · average + (1 − decay) · tensor, once a step, beginning with the first step's tensors.

    Statistics of batch norms belong to the weights they were taken with, so they are averaged as well.

    Args:
        tensors: parameters and buffers.
        decay: in (0, 1).
    """

    def __init__(self, tensors: Sequence[WorkerTensor], decay: float) -> None:
        self._tensors, self._decay = tensors, decay
        self._averages: list[torch.Tensor] = []

    def update(self) -> None:
        """Adds the tensors as they are now."""
        self._averages = self._with_current()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the model has the average, the current tensors included."""
        averages = self._with_current()
        trained = [tensor.values.clone() for tensor in self._tensors]
        try:
            self._fill(averages)
            yield
        finally:
            self._fill(trained)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the averages by name; empty before the first step."""
        return {tensor.name: average.clone() for tensor, average in zip(self._tensors, self._averages, strict=False)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._averages = [state[tensor.name].to(tensor.values.device).clone() for tensor in self._tensors if state]

    def _with_current(self) -> list[torch.Tensor]:
        for tensor in self._tensors:
            if tensor.state:
                tensor.read()
        if not self._averages:
            return [tensor.values.clone() for tensor in self._tensors]
        pairs = zip(self._averages, self._tensors, strict=True)
        return [average.lerp(tensor.values, 1 - self._decay) for average, tensor in pairs]

    def _fill(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.values.copy_(value)
            tensor.write()
