"""Hooks on the beginning and end of FSDP2's forward and backward passes, by its private names.

FSDP2's root is the module that runs its forward pass first. It may be sharded after `fsdp.compress`, or contain the
compressed model. A step ends when the root ends its backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class Passes:
    """Calls hooks before every forward pass, outside of backward passes, and after every backward pass.

    Reentrantly checkpointed activations run nested backward passes; FSDP ends only the outermost. If there are several
    roots, hooks are called for each.

    Args:
        model: has sharded modules.
        begins: called before forward passes; if only a part of the model runs, for every sharded module in it.
        ends: called after backward passes, when FSDP has ended them.

    Attributes:
        takes_gradients: whether the latest forward pass belongs to a step, and not to an evaluation. (Reentrantly
            checkpointed activations have no gradients in it.)
    """

    def __init__(self, model: nn.Module, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins, self._ends = begins, ends
        self.takes_gradients = True
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ours: weakref.WeakSet[Any] = weakref.WeakSet()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                if state not in self._followed:
                    self._follow(state)
                    # Each state calls it at the beginning of its forward pass.
                    self._ours.add(state)
                    state._lazy_init = partial(self._before_forward, state, state._lazy_init)

    def _follow(self, state: Any) -> None:
        self._followed.add(state)
        state._root_post_backward_final_callback = partial(self._end_backward, state._root_post_backward_final_callback)

    def _before_forward(self, state: Any, lazy_init: Callable[[], None]) -> None:
        lazy_init()
        if (root := state._state_ctx.iter_forward_root) is not None and root in self._ours:
            return  # the pass has begun already
        self.takes_gradients = torch.is_grad_enabled()
        for each in state._state_ctx.all_states:  # also of a root around this model
            if each not in self._followed:
                self._follow(each)
        if torch._C._current_graph_task_id() == -1:  # else activations are computed again
            self._begins()

    def _end_backward(self, fsdp_ends_it: Callable[[], None]) -> None:
        fsdp_ends_it()
        torch.autograd.Variable._execution_engine.queue_callback(self._ends)  # after the other roots'
