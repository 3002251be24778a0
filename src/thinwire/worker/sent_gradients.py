"""Gradients that have left during the backward pass: a later change of one, or of a learning rate, is an error.

torch counts how often a tensor was changed in place, so looking costs a few attributes. What is written through `.data`
it does not count, and values are not compared: that would be a pass over all gradients.
"""

from __future__ import annotations

import torch

from thinwire.errors import ConfigError
from thinwire.optimizers.options import ParameterGroups, Settings
from thinwire.worker.model import WorkerTensor

NAMED = 4
"""How many parameters a message names."""


class SentGradients:
    """The gradients of the step under way that have left, as they were then."""

    def __init__(self) -> None:
        # The tensors themselves: of one that is gone, another may have the place in memory.
        self._left: list[tuple[WorkerTensor, torch.Tensor, int]] = []
        self._settings: Settings | None = None

    def add(self, tensor: WorkerTensor, groups: ParameterGroups | None) -> None:
        """A parameter's gradient has left, with the rates and options that groups have now; None: they do not count."""
        if self._settings is None and groups is not None:
            self._settings = groups.settings
        if (gradient := tensor.parameter.grad) is not None:
            self._left.append((tensor, gradient, gradient._version))

    def end_step(self, groups: ParameterGroups) -> None:
        """Forgets them, so that the step can be ended with what has left, whatever was changed.

        Raises:
            ConfigError: one was changed in place, replaced or removed; or a rate or an option was.
        """
        left, settings = self._left, self._settings
        self._left, self._settings = [], None
        changed = [
            tensor.name
            for tensor, gradient, version in left
            if tensor.parameter.grad is not gradient or gradient._version != version
        ]
        if changed:
            names = ", ".join(map(repr, changed[:NAMED])) + (", …" if len(changed) > NAMED else "")
            raise ConfigError(
                f"{len(changed)} gradients were changed after they had left ({names}): each is sent as soon as "
                "backward() has made it, so that clipping between backward() and step(), or what "
                "DistributedDataParallel does around the model, has no effect. Give tw.distribute(…, overlap=False), "
                "with which gradients leave at step(), or change none in between. Another step() ends this one with "
                "what has left, without its closure"
            )
        if settings is not None and settings != groups.settings:
            raise ConfigError(
                "a learning rate or another option of the optimizer was changed between backward() and step(), after "
                "gradients had left with what it was: they would be applied with the one and the others with the "
                "other. Change it before backward() or after step(), or give tw.distribute(…, overlap=False). Another "
                "step() ends this one as it is, without its closure"
            )
