"""Hooks on a model that call a worker's procedures.

A layer's update is applied before its forward pass; a gradient is pushed when the backward pass has produced it.
`driver` runs the procedures, which the worker defines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import nn

from thinwire.cautions import caution
from thinwire.errors import ThinwireError
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.model_places import ModelPlaces
from thinwire.worker.core import Worker
from thinwire.worker.model import WorkerTensor

_WHY_NOT_WHOLE = "thinwire takes updates from servers before a layer computes: compile without fullgraph=True"
"""Torch's message if the user asked for one graph."""
_constant: Any = torch.compiler.assume_constant_result  # untyped in torch


class ModelHooks:
    """Hooks on one model, from construction until `remove`.

    Args:
        model: has the parameters and buffers of the worker's tensors.
        worker: defines the procedures that the hooks run.
        driver: runs them.
    """

    def __init__(self, model: nn.Module, worker: Worker, driver: WorkerDriver) -> None:
        self._worker, self._driver, self._tensors = worker, driver, worker.model.tensors
        self._is_copy = self._is_called = False
        # Torch would trace a compiled model's hooks, and the functions that they call, into the graph.
        disable: Any = torch.compiler.disable  # untyped in torch
        takes_reason = "reason" in signature(disable).parameters  # torch 2.6 does not
        reason = {"reason": _WHY_NOT_WHOLE} if takes_reason else {}
        self._pull, self._pull_all = disable(self._pull_now, **reason), disable(self.await_updates, **reason)
        self._traced: list[Callable[[], int]] = []
        self._reached: set[int] = set()
        self._unreached: list[int] | None = None
        self._handles: list[Any] = []
        index = {id(tensor.parameter): number for number, tensor in enumerate(self._tensors)}
        self.places = ModelPlaces(model, self._tensors, self.remove)
        # First of all hooks: weight_norm and similar ones compute a layer's weight from its parameters in such a hook.
        for module in model.modules():
            own = [index[id(parameter)] for parameter in module._parameters.values() if id(parameter) in index]
            if module is model:
                self._handles.append(model.register_forward_pre_hook(partial(self._before_model, own), prepend=True))
                self._handles.append(model.register_forward_hook(self._after_model, always_call=True))
            elif own := own + [index[id(buffer)] for buffer in module._buffers.values() if id(buffer) in index]:
                before = partial(self._before_layer, own, len(self._traced))
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
                self._traced.append(self._when_traced(own))
        register_before_state: Any = model.register_state_dict_pre_hook  # untyped in torch
        self._handles.append(register_before_state(self.settle))
        for tensor in self._tensors:
            if tensor.parameter.requires_grad:
                register: Any = tensor.parameter.register_post_accumulate_grad_hook  # untyped in torch
                # A compiled training step would compile the backward pass's hooks, too.
                self._handles.append(register(disable(partial(self._after_gradient, tensor))))

    def remove(self) -> None:
        """Removes every hook."""
        self.places.leave()
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or saved model, such as one of averaged weights, gets hooks without effect."""
        return _hooks_of_copy, ()

    def await_updates(self) -> None:
        """Waits for all updates that a forward pass would wait for, and applies them."""
        if not self._worker.idle:
            self._pull_now(range(len(self._tensors)))

    def settle(self, *_: Any) -> None:
        """Waits for updates before a state is saved; if they do not come, warns that the state lacks them.

        A signal handler that interrupts a procedure of this thread would take its message, so it does not wait.
        """
        if self._is_copy or self._worker.closed or self._driver.runs_here:
            return
        try:
            self.await_updates()
        except ThinwireError as error:
            caution(f"the state lacks the last exchange, which has not completed: {error}")

    def _before_model(self, own: list[int], *_: Any) -> None:
        if self._is_copy:
            return
        self._is_called = True
        if torch.compiler.is_compiling():  # model.compile(): pulls before its one graph
            self._pull_all()
            return
        # Some modules use another's parameters without calling it (attention does), and compiled layers call no hook.
        # The first forward pass shows which tensors no call announces; from the second on, the model's own call waits
        # for them, and for what has been compiled since.
        if self._worker.began and self._unreached is None:
            self._unreached = [index for index in range(len(self._tensors)) if index not in self._reached]
        if not self._worker.idle:
            self._pull_now({*own, *(self._unreached or ())})

    def _after_model(self, *_: Any) -> None:
        if not self._is_copy:
            self._is_called = False

    def _before_layer(self, own: list[int], layer: int, *_: Any) -> None:
        if self._is_copy:
            return
        if torch.compiler.is_compiling():
            # A pull would split the graph here and before every other layer, so the model's own call pulls.
            if self._is_called:
                self._traced[layer]()
            else:
                self._pull(own)
            return
        self._reached.update(own)
        if not self._worker.idle:
            self._pull_now(own)

    def _when_traced(self, own: list[int]) -> Callable[[], int]:
        """Returns a function that torch calls once, while it traces a layer; its result is a constant in the graph."""

        def traced() -> int:
            self._reached.difference_update(own)
            self._unreached = None
            self._pull_now(own)  # for this pass: the model's call came before the trace
            return 0

        return cast("Callable[[], int]", _constant(traced))

    def _pull_now(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self._worker.awaits(tensor := self._tensors[index]):
                self._driver.run(self._worker.pull(tensor))

    def _after_gradient(self, tensor: WorkerTensor, _parameter: torch.Tensor) -> None:
        if not self._worker.idle:
            self._driver.run(self._worker.gradient_ready(tensor))


def _hooks_of_copy() -> ModelHooks:
    hooks = ModelHooks.__new__(ModelHooks)
    hooks._is_copy = True
    return hooks
