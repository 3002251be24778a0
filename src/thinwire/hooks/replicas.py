"""Equal replicas by DistributedDataParallel: the script's wrapper, or one around a bare model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ConfigError
from thinwire.hooks.quiet_ddp import Training, disable_ddp_allreduce, enable_ddp_allreduce
from thinwire.hooks.wrapping import inside_compiled
from thinwire.runtime.peers import gather
from thinwire.transports.peers import PeerGroup


class Replicas:
    """Averages the gradients of a model over the ranks, whether the script calls the model or a wrapper.

    Hooks on a bare model run the wrapper's work before and after its forward pass, as torch's composable `replicate`
    does, except without gradients, so that rank 0 may evaluate alone.

    Args:
        model: the module that the script calls.
        group: the ranks that train it.
        wrapped: the script's wrapper, which is not changed; None: a wrapper is made here.
        **options: of the wrapper made here.

    Attributes:
        ddp: the wrapper.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, wrapped: DistributedDataParallel | None = None, **options: Any
    ) -> None:
        self._is_copy, self._called = False, True
        self._handles: list[Any] = []
        if wrapped is not None:
            self.ddp = wrapped
            return
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigError(
                "a ScriptModule supports no hooks, which a bare model needs: wrap it in DistributedDataParallel before "
                "tw.distribute, or use torch.compile in place of torch.jit.script"
            )
        self.ddp = DistributedDataParallel(inside_compiled(model), process_group=group, **options)
        # In a compiled model, torch would trace into the reducer.
        disable: Any = torch.compiler.disable  # untyped in torch
        self._enter, self._leave = disable(self._enter_now), disable(self.ddp._post_forward)
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after),
        ]

    def _before(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self._is_copy or not torch.is_grad_enabled() else self._enter(args, kwargs)

    def _enter_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._called = True
        ddp: Any = self.ddp  # untyped in torch
        return ddp._pre_forward(*args, **kwargs)

    def _after(self, _model: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return output if self._is_copy or not torch.is_grad_enabled() else self._leave(output)

    def check_called(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError if a step has gradients although the bare model was not called: they are not averaged."""
        called, self._called = self._called, not self._handles
        if not called and any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "the model has gradients, and was not called since the last step, so that no rank sees another's: call "
                "model(…), and no method or part of it, or wrap it in DistributedDataParallel before tw.distribute"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients."""
        with self.ddp.no_sync():
            yield

    def close(self) -> None:
        """Removes the hooks from the model; the script's wrapper stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or saved model, such as one of averaged weights, gets hooks without effect."""
        return _of_copy, ()


def _of_copy() -> Replicas:
    replicas = Replicas.__new__(Replicas)
    replicas._is_copy, replicas._handles = True, []
    return replicas


def suspend_allreduce(wrapped: DistributedDataParallel, training: Training) -> Callable[[], None]:
    """Suspends a wrapper's all-reduce of gradients; returns a function that resumes it.

    Args:
        wrapped: the script's. With a static graph it records the graph in its first backward pass, so only a
            communication hook can suspend it.
        training: the training during which it is suspended.
    """
    if wrapped.static_graph:
        disable_ddp_allreduce(wrapped, training)
        return partial(enable_ddp_allreduce, wrapped)
    handle = wrapped.register_forward_pre_hook(_keep_from_sending)  # a communication hook would stay for ever

    def resume() -> None:
        handle.remove()
        wrapped.require_backward_grad_sync = True
        enable_ddp_allreduce(wrapped)

    return resume


def _keep_from_sending(wrapped: Any, _args: tuple[Any, ...]) -> None:
    """As within `no_sync`, at every forward pass: a script that accumulates gradients sets the attribute itself."""
    wrapped.require_backward_grad_sync = False


def follow_rank_0(
    module: nn.Module, optimizer: torch.optim.Optimizer, peers: PeerGroup, group: dist.ProcessGroup
) -> None:
    """Copies rank 0's parameters, buffers and optimizer state to every rank; all ranks call it.

    If ranks' states of a parameter differ in kind, because a rank has not used the parameter yet, all clear the state.

    Args:
        module: of the training.
        optimizer: of every rank.
        peers: all ranks.
        group: the same ranks, for tensors on the model's device.
    """
    parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
    own = [optimizer.state.get(each, {}) for each in parameters]
    described = [json.loads(each) for each in gather(peers, json.dumps([_described(each) for each in own]).encode())]
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    for place, state in enumerate(own):
        first = described[0][place]
        if any([each[:2] for each in theirs[place]] != [each[:2] for each in first] for theirs in described):
            state.clear()
            continue
        for name, _, value in first:
            if value is None:
                tensors.append(state[name])
            else:
                state[name] = value
    broadcast(tensors, next(module.parameters()).device, group)


def broadcast(tensors: Iterable[Any], device: torch.device, group: dist.ProcessGroup) -> None:
    """Copies rank 0's tensors to every rank; all ranks call it.

    Args:
        tensors: of any dtype; other values are skipped.
        device: from which they are sent.
        group: of all ranks.
    """
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                sent = tensor.detach().to(device).contiguous()
                dist.broadcast(sent.reshape(-1).view(torch.uint8), source, group=group)
                tensor.copy_(sent)


def _described(state: dict[str, Any]) -> list[tuple[str, str, float | None]]:
    """Returns the names and kinds of an optimizer's state of a parameter, and numbers that are no tensors."""
    return [
        (name, f"{value.dtype} {tuple(value.shape)}", None)
        if isinstance(value, torch.Tensor)
        else (name, type(value).__name__, value if isinstance(value, int | float) else None)
        for name, value in sorted(state.items())
    ]
