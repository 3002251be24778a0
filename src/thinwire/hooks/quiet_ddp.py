"""DistributedDataParallel around a model of local updates, as frameworks put it: it stays, and sends no gradients."""

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
from thinwire.hooks.wrapping import inside_compiled
from thinwire.policies.designs import Design


class Training(Protocol):
    """For whose time a wrapper is quiet."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""


class _Quiet:
    """Whose gradients a wrapper keeps to its rank: the state of its communication hook. A copy of it is nobody's.

    Attributes:
        optimizer: trains with them.
        broadcasts: whether the wrapper sent rank 0's buffers to all before.
        group: averages them, as DDP does without a hook, where the wrapper is to send again: it takes no second hook.
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

    def __reduce__(self) -> tuple[type[_Quiet], tuple[()]]:
        return _Quiet, ()


def reducing(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel that averages gradients of these ranks already; None where none does."""
    inner = inside_compiled(model)
    if not isinstance(inner, DistributedDataParallel):
        return None
    both = {*dist.get_process_group_ranks(group)} & {*dist.get_process_group_ranks(inner.process_group)}
    return inner if len(both) > 1 else None


def check_quiet(model: nn.Module, wrapped: DistributedDataParallel, group: dist.ProcessGroup, design: Design) -> None:
    """Raises ConfigError where DistributedDataParallel cannot be kept from sending gradients.

    Args:
        model: as it was given; `wrapped`, or compiled from it.
        wrapped: what would send.
        group: whose ranks exchange local updates.
        design: of the training.
    """
    check_silent(model, wrapped, group, design)
    if wrapped.find_unused_parameters and not wrapped.static_graph:
        caution(
            "DistributedDataParallel(find_unused_parameters=True) has ranks tell each other at every step which "
            "parameters they used, and so wait for each other, which local updates are to save: leave it out (of the "
            "Trainer: ddp_find_unused_parameters=False)"
        )


def check_silent(model: nn.Module, wrapped: DistributedDataParallel, group: dist.ProcessGroup, design: Design) -> None:
    """Raises ConfigError as `check_quiet` does, which also tells of what costs time."""
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
    if any(not isinstance(state, _Quiet) for _, state in wrapped._comm_hooks):
        raise ConfigError(
            "DistributedDataParallel has a communication hook already, and local updates need one that sends nothing: "
            "leave ddp.compress, or that hook, out"
        )


def disable_ddp_allreduce(wrapped: DistributedDataParallel, optimizer: Training) -> None:
    """Has every rank keep its own gradients and buffers from now on; what local steps change is exchanged instead."""
    ours = _hooks(wrapped)
    quiet = ours[0] if ours else _Quiet()
    if not ours:  # also of a wrapper that was copied, whose reducer has no hook
        quiet.broadcasts = wrapped.broadcast_buffers
        wrapped.register_comm_hook(quiet, _own_gradients)
    wrapped.broadcast_buffers = False  # those of worker 0 travel with the exchanges
    quiet.optimizer, quiet.group = weakref.ref(optimizer), None


def enable_ddp_allreduce(wrapped: DistributedDataParallel) -> None:
    """Has a wrapper that an earlier training kept quiet average gradients again; any other stays as it is."""
    for quiet in _hooks(wrapped):
        quiet.group, wrapped.broadcast_buffers = wrapped.process_group, quiet.broadcasts


def _hooks(wrapped: DistributedDataParallel) -> list[_Quiet]:
    return [state for _, state in wrapped._comm_hooks if isinstance(state, _Quiet) and state.optimizer is not None]


def _own_gradients(quiet, bucket):  # type: ignore[no-untyped-def]
    """A communication hook without communication: DDP compares annotations with types, so there are none here."""
    if quiet.group is not None:
        return allreduce_hook(quiet.group, bucket)
    if quiet.is_over:
        caution(
            "tw.distribute has kept this DistributedDataParallel from sending gradients, and its optimizer is closed: "
            "every rank trains by itself. Wrap the model anew, or give it to tw.distribute again"
        )
    values = bucket.buffer()
    done: Any = torch.futures.Future(devices=[values.device] if values.is_cuda else None)
    done.set_result(values)
    return done
