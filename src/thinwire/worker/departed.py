"""Gradients that have left during the backward pass: whoever changes one afterwards is told that nobody sees it.

torch counts how often a tensor was changed in place, so looking costs a few attributes. What is written through `.data`
it does not count, and values are not compared: that would be a pass over all gradients.
"""

from __future__ import annotations

import torch

from thinwire.errors import ConfigError
from thinwire.worker.model import WorkerTensor

NAMED = 4
"""How many parameters a message names."""


class Departed:
    """The gradients of the step under way that have left, as they were then."""

    def __init__(self) -> None:
        # The tensors themselves: of one that is gone, another may have the place in memory.
        self._left: list[tuple[WorkerTensor, torch.Tensor, int]] = []

    def add(self, tensor: WorkerTensor) -> None:
        """A parameter's gradient has left."""
        if (gradient := tensor.parameter.grad) is not None:
            self._left.append((tensor, gradient, gradient._version))

    def end_step(self) -> None:
        """Forgets them, where all are as they were.

        Raises:
            ConfigError: one was changed in place, replaced or removed.
        """
        changed = [
            tensor.name
            for tensor, gradient, version in self._left
            if tensor.parameter.grad is not gradient or gradient._version != version
        ]
        if changed:
            names = ", ".join(map(repr, changed[:NAMED])) + (", …" if len(changed) > NAMED else "")
            raise ConfigError(
                f"{len(changed)} gradients were changed after they had left ({names}): each is sent as soon as "
                "backward() has made it, so that clipping between backward() and step(), or what "
                "DistributedDataParallel does around the model, has no effect. Give tw.distribute(…, overlap=False), "
                "with which gradients leave at step(), or change none in between"
            )
        self._left.clear()
