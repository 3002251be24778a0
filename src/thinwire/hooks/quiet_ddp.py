"""Stops the all-reduce of a DistributedDataParallel around a model, and refuses one that would go on sending."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.hooks.wrapping import hook_of_copy, inside_compiled
from thinwire.policies.designs import Design


class Training(Protocol):
    """The training during which a wrapper sends no gradients."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""


class _HookState:
    """The state of the communication hook that keeps gradients on their rank. A copy has no optimizer.

    Attributes:
        optimizer: uses the gradients.
        broadcasts: whether the wrapper broadcast rank 0's buffers before.
        group: None, or the group over which the hook averages gradients as DDP does: a wrapper accepts no second hook.
    """

    def __init__(self) -> None:
        self.optimizer: weakref.ref[Training] | None = None
        self.broadcasts = True
        self.group: dist.ProcessGroup | None = None

    @property
    def is_over(self) -> bool:
        """Whether the training has ended."""
        trained = None if self.optimizer is None else self.optimizer()
        return trained is None or trained.closed

    def __reduce__(self) -> tuple[type[_HookState], tuple[()]]:
        return _HookState, ()


def reducing(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel | None:
    """Returns the model's DistributedDataParallel if it averages gradients of these ranks; else None."""
    inner = inside_compiled(model)
    if not isinstance(inner, DistributedDataParallel):
        return None
    both = {*dist.get_process_group_ranks(group)} & {*dist.get_process_group_ranks(inner.process_group)}
    return inner if len(both) > 1 else None


class _OtherWrapper:
    """Refuses a wrapper that `tw.distribute` was not given, in the first forward pass of a bare model.

    A wrapper leaves no trace in what it wraps, so only a forward pass shows it.

    Args:
        model: as it was given to `tw.distribute`, without DistributedDataParallel.
        group: the ranks that train it.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._handle = model.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        """Runs before the forward pass.

        Raises:
            ConfigError: the model is called by a DistributedDataParallel.
        """
        if torch.compiler.is_compiling():
            return
        wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if wrapper is not None and reducing(wrapper, self._group) is not None:
            raise ConfigError(
                "the model is called by a DistributedDataParallel that tw.distribute does not know, and that sends "
                "every gradient uncompressed: wrap the model before tw.distribute and give it the wrapper, or leave "
                "DistributedDataParallel out"
            )
        self._handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or saved model gets a hook without effect."""
        return hook_of_copy, ()


def refuse_other_wrapper(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Has a model that was given bare to `tw.distribute` refuse to be called by a DistributedDataParallel.

    A ScriptModule takes no hooks.
    """
    if not isinstance(inside_compiled(model), DistributedDataParallel | torch.jit.ScriptModule):
        _OtherWrapper(model, group)


def check_wrapper(model: nn.Module, wrapped: DistributedDataParallel, group: dist.ProcessGroup, design: Design) -> None:
    """Checks a wrapper for local updates, and warns of an option that costs time.

    Args:
        model: as it was given; `wrapped`, or compiled from it.
        wrapped: the DistributedDataParallel.
        group: the ranks that exchange local updates.
        design: of the training.

    Raises:
        ConfigError: the wrapper's all-reduce cannot be disabled.
    """
    check_can_disable_allreduce(model, wrapped, group, design)
    if wrapped.find_unused_parameters and not wrapped.static_graph:
        caution(
            "DistributedDataParallel(find_unused_parameters=True) makes ranks exchange the names of used parameters, "
            "and so wait for each other, at every step, which local updates avoid: leave it out (in the Trainer: "
            "ddp_find_unused_parameters=False)"
        )


def check_can_disable_allreduce(
    model: nn.Module, wrapped: DistributedDataParallel, group: dist.ProcessGroup, design: Design
) -> None:
    """Raises ConfigError if the wrapper's all-reduce cannot be disabled. The arguments are those of `check_wrapper`."""
    ranks, reduced = (sorted(dist.get_process_group_ranks(each)) for each in (group, wrapped.process_group))
    if design.local is None or ranks != reduced:
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel, which sends every gradient uncompressed between the "
            "ranks that are to exchange by thinwire: leave DistributedDataParallel out, thinwire replaces it"
            + (f"; it is over ranks {reduced}, and group= over {ranks}" if ranks != reduced else "")
        )
    if model is not wrapped:
        raise ConfigError(
            "the model is compiled with DistributedDataParallel inside, whose gradients would be sent in the graph: "
            "leave DistributedDataParallel out, or compile what it wraps"
        )
    if any(not isinstance(state, _HookState) for _, state in wrapped._comm_hooks):
        raise ConfigError(
            "DistributedDataParallel has a communication hook already, and local updates need a hook that sends no "
            "gradients: leave ddp.compress, or that hook, out"
        )


def disable_ddp_allreduce(wrapped: DistributedDataParallel, optimizer: Training) -> None:
    """Makes every rank keep its gradients and buffers from now on: local updates are exchanged instead."""
    ours = _hook_states(wrapped)
    state = ours[0] if ours else _HookState()
    if not ours:  # also for a copied wrapper, which has no hook in its reducer
        state.broadcasts = wrapped.broadcast_buffers
        wrapped.register_comm_hook(state, _keep_gradients)
    wrapped.broadcast_buffers = False  # the exchanges contain worker 0's
    state.optimizer, state.group = weakref.ref(optimizer), None


def enable_ddp_allreduce(wrapped: DistributedDataParallel) -> None:
    """Enables the all-reduce of a wrapper again, if an earlier training disabled it."""
    for state in _hook_states(wrapped):
        state.group, wrapped.broadcast_buffers = wrapped.process_group, state.broadcasts


def _hook_states(wrapped: DistributedDataParallel) -> list[_HookState]:
    return [state for _, state in wrapped._comm_hooks if isinstance(state, _HookState) and state.optimizer is not None]


def _keep_gradients(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook without communication: DDP compares annotations with types, so there are none here."""
    if state.group is not None:
        return allreduce_hook(state.group, bucket)
    if state.is_over:
        caution(
            "tw.distribute has kept this DistributedDataParallel from sending gradients, and its optimizer is closed: "
            "every rank trains by itself. Wrap the model anew, or give it to tw.distribute again"
        )
    values = bucket.buffer()
    done: Any = torch.futures.Future(devices=[values.device] if values.is_cuda else None)
    done.set_result(values)
    return done
