"""Hooks on a torch model: a layer's update is applied before its forward pass, a gradient leaves when it exists.

This file knows when torch calls; what is then sent and applied is the exchange's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from thinwire.hooks.exchange import Exchange
from thinwire.hooks.tensors import Tensor


class ModelHooks:
    """The hooks on one model, from the moment this is made until `remove`.

    Args:
        model: whose parameters and buffers the exchange's tensors are.
        exchange: what the hooks call.
    """

    def __init__(self, model: nn.Module, exchange: Exchange) -> None:
        self._exchange = exchange
        self._tensors = exchange.tensors
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
        """Leaves the model as it was found."""
        for handle in self._handles:
            handle.remove()

    def _indices(self, tensors: list[torch.Tensor | None] | list[nn.Parameter | None]) -> list[int]:
        return [self._index[id(tensor)] for tensor in tensors if tensor is not None and id(tensor) in self._index]

    def _before_layer(self, indices: list[int]) -> Callable[..., None]:
        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            self._reached.update(indices)
            for index in indices:
                self._exchange.pull(self._tensors[index])

        return before_forward

    def _before_model(self, own: list[int]) -> Callable[..., None]:
        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            # Some modules use another's parameters without calling it (attention does). The first forward pass
            # shows which tables no call announces; from the second on, the model's own call waits for them.
            if self._exchange.began and self._unreached is None:
                self._unreached = [index for index in range(len(self._tensors)) if index not in self._reached]
            for index in {*own, *(self._unreached or ())}:
                self._exchange.pull(self._tensors[index])

        return before_forward

    def _after_gradient(self, tensor: Tensor) -> Callable[[torch.Tensor], None]:
        def after_accumulate(_parameter: torch.Tensor) -> None:
            self._exchange.gradient_ready(tensor)

        return after_accumulate
