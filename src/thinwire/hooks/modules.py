"""Hooks on a torch model: a layer's update is applied before its forward pass, a gradient is pushed when it exists.

This file knows when torch calls; the worker decides what is then sent and applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from thinwire.runtime.driver import WorkerDriver
from thinwire.worker.core import Worker
from thinwire.worker.tensor import WorkerTensor


class ModelHooks:
    """The hooks on one model, from the moment this is made until `remove`.

    Args:
        model: whose parameters and buffers the worker's tensors are.
        worker: whose procedures the hooks run.
        driver: runs them.
    """

    def __init__(self, model: nn.Module, worker: Worker, driver: WorkerDriver) -> None:
        self._worker, self._driver = worker, driver
        self._tensors = worker.model.tensors
        self._index = {id(tensor.parameter): index for index, tensor in enumerate(self._tensors)}
        self._reached: set[int] = set()
        self._unreached: list[int] | None = None
        self._handles: list[Any] = []
        for module in model.modules():
            indices = self._indices([*module._parameters.values(), *module._buffers.values()])
            if indices and module is not model:
                self._handles.append(module.register_forward_pre_hook(self._before_layer(indices)))
        own = self._indices(list(model._parameters.values()))
        self._handles.append(model.register_forward_pre_hook(self._before_model(own)))
        for tensor in self._tensors:
            if not tensor.state:
                register: Any = tensor.parameter.register_post_accumulate_grad_hook  # untyped in torch
                self._handles.append(register(self._after_gradient(tensor)))

    def remove(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()

    def _indices(self, tensors: list[torch.Tensor | None] | list[nn.Parameter | None]) -> list[int]:
        return [self._index[id(tensor)] for tensor in tensors if tensor is not None and id(tensor) in self._index]

    def _before_layer(self, indices: list[int]) -> Callable[..., None]:
        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            self._reached.update(indices)
            for index in indices:
                self._driver.run(self._worker.pull(self._tensors[index]))

        return before_forward

    def _before_model(self, own: list[int]) -> Callable[..., None]:
        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            # Some modules use another's parameters without calling it (attention does). The first forward pass
            # shows which tables no call announces; from the second on, the model's own call waits for them.
            if self._worker.began and self._unreached is None:
                self._unreached = [index for index in range(len(self._tensors)) if index not in self._reached]
            for index in {*own, *(self._unreached or ())}:
                self._driver.run(self._worker.pull(self._tensors[index]))

        return before_forward

    def _after_gradient(self, tensor: WorkerTensor) -> Callable[[torch.Tensor], None]:
        def after_accumulate(_parameter: torch.Tensor) -> None:
            self._driver.run(self._worker.gradient_ready(tensor))

        return after_accumulate
