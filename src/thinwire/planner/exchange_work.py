"""What an exchange with a server takes of processors besides its codecs, links and transport.

A model of nothing but the profiled tensors trains in one process, by `distribute` and a server on the memory transport,
with the profiled gradients. What worker and server then take, less what the same model takes without an exchange, and
less what codecs take of it, is what plans, messages, tables and the server's optimizer take. Seconds are those of the
one thread that does it all, so that other work on the machine hardly changes them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn

from thinwire.hooks.distribute import distribute
from thinwire.planner.costs import TensorCosts, exchange_every
from thinwire.planner.profile import Profile
from thinwire.policies.designs import Design
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection
from thinwire.transports.memory import MemoryServer

WARMING, STEPS = 3, 24
LARGEST_NUMEL = 50_000_000
"""A larger model is not held four times more for this: what grows with its values is the codecs'."""


@dataclass(frozen=True, kw_only=True)
class ExchangeWork:
    """Seconds of a processor for one exchange of one worker, at both ends."""

    worker_s: float = 0.0
    server_s: float = 0.0


NONE = ExchangeWork()


def measure_exchange_work(profile: Profile, design: Design, costs: Mapping[str, TensorCosts]) -> ExchangeWork:
    """Returns what is measured; nothing for local updates, whose workers hold the optimizer, and for very large models.

    Args:
        profile: of the model, with its gradients.
        design: how it is to be trained.
        costs: of its tensors, by name.
    """
    numel = sum(torch.Size(each.shape).numel() for each in profile.tensors)
    if design.local is not None or numel > LARGEST_NUMEL:
        return NONE
    if exchange_every(design) > 1:  # what is accumulated in between travels as any gradient does: exchange every step
        design = replace(design, consistency="bsp")
    plain, exchanging = _StandIn(profile), _StandIn(profile)
    optimizer = _sgd(plain)
    alone_s = median(_seconds(plain, optimizer.zero_grad, optimizer.step))
    server = MemoryServer(serving(ServerCore()))
    connection = _Timed(server.connect())
    try:
        with distribute(exchanging, _sgd(exchanging), server=connection, design=design) as distributed:
            served: list[float] = []

            def step() -> None:
                distributed.step()
                served.append(connection.server_s)

            both_s = median(_seconds(exchanging, distributed.zero_grad, step))
    finally:
        server.stop(grace_s=0)
    # A step's pushes leave in its backward pass and its end, and what comes of them is taken in the next one.
    server_s = median([after - before for before, after in itertools.pairwise(served)][-STEPS:])
    coded = {each: sum(getattr(cost, each) for cost in costs.values()) for each in TensorCosts.__dataclass_fields__}
    return ExchangeWork(
        worker_s=max(0.0, both_s - server_s - alone_s - coded["encode_s"] - coded["decode_s"]),
        server_s=max(0.0, server_s - coded["server_push_s"] - coded["server_update_s"]),
    )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that stands in for the training's own, of which a server may have none."""
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def _seconds(model: _StandIn, zero_grad: Callable[[], object], step: Callable[[], object]) -> list[float]:
    seconds = []
    for number in range(WARMING + STEPS):
        begun = time.thread_time()
        zero_grad()
        model(number).backward()
        step()
        seconds.append(time.thread_time() - begun)
    return seconds[WARMING:]


class _Holder(nn.Module):
    """A module of some tensors, whose gradients are what they are multiplied with."""

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found = [(value * gradients[name]).sum() for name, value in self.named_parameters(recurse=False)]
        return torch.stack(found).sum()


class _StandIn(nn.Module):
    """Tensors of the profiled names and shapes, with the profiled gradients step by step."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._holders: dict[str, _Holder] = {}
        self._steps = [
            {each.name: step.get(each.name, torch.zeros(each.shape)) for each in profile.tensors}
            for step in profile.gradients
        ]
        inner = _Holder()
        self.add_module("m", inner)
        for each in profile.tensors:
            path, _, last = each.name.rpartition(".")
            holder = inner
            for part in filter(None, path.split(".")):
                if part not in holder._modules:
                    holder.add_module(part, _Holder())
                below = holder._modules[part]
                assert isinstance(below, _Holder)
                holder = below
            holder.register_parameter(last, nn.Parameter(torch.zeros(each.shape)))
            self._holders[path] = holder

    def forward(self, number: int) -> torch.Tensor:
        gradients = self._steps[number % len(self._steps)]
        found = []
        for path, holder in self._holders.items():
            prefix = f"{path}." if path else ""
            found.append(holder({name: gradients[prefix + name] for name, _ in holder.named_parameters(recurse=False)}))
        return torch.stack(found).sum()


class _Timed(Connection):
    """A connection of the memory transport: the server works when it is sent to, and that is timed."""

    def __init__(self, inner: Connection) -> None:
        self._inner, self.address = inner, inner.address
        self.server_s = 0.0

    def send(self, packet: bytes) -> None:
        begun = time.thread_time()
        self._inner.send(packet)
        self.server_s += time.thread_time() - begun

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        return self._inner.receive(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        self._inner.close(timeout_s)

    def abort(self) -> None:
        self._inner.abort()
