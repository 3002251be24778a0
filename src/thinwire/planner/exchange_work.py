"""Processor seconds of an exchange with a server, besides its codecs, links and transport.

A model of nothing but the profiled tensors trains in one process, by `distribute` and a server on the memory transport,
with the profiled gradients. Plans, messages, tables and the server's optimizer take what worker and server take there,
less the same model's seconds without an exchange, less the codecs'. Seconds are those of the one thread that does it
all, so other work on the machine hardly changes them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn

from thinwire.hooks.distribute import distribute
from thinwire.planner.costs import exchange_every
from thinwire.planner.profile import Profile
from thinwire.planner.step_time import TensorCosts
from thinwire.policies.designs import Design
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer

WARMING, STEPS = 3, 24
LARGEST_NUMEL = 50_000_000
"""A larger model is not held four more times for this: what grows with its values is the codecs'."""


@dataclass(frozen=True, kw_only=True)
class ExchangeWork:
    """Seconds of a processor for one exchange of one worker, at both ends."""

    worker_s: float = 0.0
    server_s: float = 0.0


NONE = ExchangeWork()


def measure_exchange_work(profile: Profile, design: Design, costs: Mapping[str, TensorCosts]) -> ExchangeWork:
    """Returns the measured seconds; `NONE` for local updates, as workers hold the optimizer, and very large models.

    Args:
        profile: of the model, with its gradients.
        design: how it is to be trained.
        costs: of its tensors, by name.
    """
    if design.local is not None or sum(math.prod(each.shape) for each in profile.tensors) > LARGEST_NUMEL:
        return NONE
    if exchange_every(design) > 1:  # accumulated gradients travel as any gradient does: exchange every step
        design = replace(design, consistency="bsp")
    plain, exchanging = _StandIn(profile), _StandIn(profile)
    optimizer = _sgd(plain)
    alone_s = median(_seconds(plain, optimizer.zero_grad, optimizer.step))
    server = MemoryServer(serving(ServerCore()))
    connection, served, server_s = server.connect(), list[float](), 0.0
    send = connection.send

    def timed_send(packet: bytes) -> None:  # the server works when it is sent to
        nonlocal server_s
        begun = time.thread_time()
        send(packet)
        server_s += time.thread_time() - begun

    connection.send = timed_send  # type: ignore[method-assign]
    try:
        with distribute(exchanging, _sgd(exchanging), server=connection, design=design) as distributed:

            def step() -> None:
                distributed.step()
                served.append(server_s)

            both_s = median(_seconds(exchanging, distributed.zero_grad, step))
    finally:
        server.stop(grace_s=0)
    # A step's pushes leave in its backward pass and its end; their answers are taken in the next one.
    server_s = median([after - before for before, after in itertools.pairwise(served)][-STEPS:])
    at_worker = sum(each.encode_s + each.decode_s for each in costs.values())
    at_server = sum(each.server_push_s + each.server_update_s for each in costs.values())
    return ExchangeWork(
        worker_s=max(0.0, both_s - server_s - alone_s - at_worker), server_s=max(0.0, server_s - at_server)
    )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The stand-in for the training's own optimizer, which a server may not have."""
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


class _StandIn(nn.Module):
    """Tensors of the profiled names and shapes, with the profiled gradients step by step."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        shapes = {each.name: each.shape for each in profile.tensors}
        self._steps = [
            {name: step.get(name, torch.zeros(shape)) for name, shape in shapes.items()} for step in profile.gradients
        ]
        for name, shape in shapes.items():  # names with dots, which `register_parameter` refuses
            self._parameters[name] = nn.Parameter(torch.zeros(shape))

    def forward(self, number: int) -> torch.Tensor:
        gradients = self._steps[number % len(self._steps)]
        return torch.stack([(value * gradients[name]).sum() for name, value in self.named_parameters()]).sum()
