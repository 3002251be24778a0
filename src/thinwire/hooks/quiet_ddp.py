"""DistributedDataParallel around a model of local updates, as frameworks put it: it stays, and sends nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.hooks.optimizer import DistributedOptimizer
from thinwire.hooks.wrapping import inside_compiled
from thinwire.policies.designs import Design


def reducing(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel that averages gradients of these ranks already; None where none does."""
    inner = inside_compiled(model)
    if not isinstance(inner, DistributedDataParallel):
        return None
    both = {*dist.get_process_group_ranks(group)} & {*dist.get_process_group_ranks(inner.process_group)}
    return inner if len(both) > 1 else None


def check_quiet(model: nn.Module, wrapped: DistributedDataParallel, design: Design) -> None:
    """Raises ConfigError where DistributedDataParallel cannot be kept from sending gradients.

    Args:
        model: as it was given; `wrapped`, or compiled from it.
        wrapped: what would send.
        design: of the training.
    """
    if design.local is None:
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel, which sends every gradient uncompressed between the "
            "ranks that are to exchange by thinwire: leave DistributedDataParallel out, thinwire replaces it"
        )
    if model is not wrapped:
        raise ConfigError(
            "the model is compiled with DistributedDataParallel inside, whose gradients would be sent in the graph: "
            "leave DistributedDataParallel out, or compile what it wraps"
        )
    if wrapped._comm_hooks:
        raise ConfigError(
            "DistributedDataParallel has a communication hook already, and local updates need one that sends nothing: "
            "leave ddp.compress, or that hook, out"
        )


def keep_quiet(wrapped: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    """Has every rank keep its own gradients and buffers from now on; what local steps change is exchanged instead."""
    wrapped.broadcast_buffers = False  # those of worker 0 travel with the exchanges
    wrapped.register_comm_hook(weakref.ref(optimizer), _own_gradients)


def _own_gradients(optimizer, bucket):  # type: ignore[no-untyped-def]
    """A communication hook without communication: DDP compares annotations with types, so there are none here."""
    trained: DistributedOptimizer | None = optimizer()
    if trained is None or trained.closed:
        caution(
            "tw.distribute has kept this DistributedDataParallel from sending gradients, and its optimizer is closed: "
            "every rank trains by itself. Wrap the model anew for another training"
        )
    values = bucket.buffer()
    done: Any = torch.futures.Future(devices=[values.device] if values.is_cuda else None)
    done.set_result(values)
    return done
