"""A cluster whose weights say which gradients were applied, and how often: consistency policies are tested on it.

Gradients are one-hot: every worker has a coordinate of its own for every iteration, the rate is 1 and gradients are
summed. So a weight of −1 says that this very gradient was applied once, 0 that it was not, −2 that it was doubled; and
a worker's copy shows exactly which gradients its model has seen. Schedules are random, and one seed is one schedule.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import thinwire as tw
from tests.designs.network import Actor, Network
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.consistency import Consistency

torch.set_num_threads(1)

ITERATIONS = 5
TABLES = 3


class Ledger(nn.Module):
    """Tables of one coordinate for each worker and iteration, in modules of their own."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        shape = (workers, ITERATIONS)
        self.pages = nn.ModuleList([_Page(shape) for _ in range(TABLES)])

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        losses = [page(gradient) for page, gradient in zip(self.pages, gradients, strict=True)]
        return torch.stack(losses).sum()

    def copies(self) -> list[NDArray[Any]]:
        return [parameter.detach().numpy().copy() for parameter in self.parameters()]


class _Page(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


@dataclass
class Diary:
    """What one worker saw."""

    seen: list[list[NDArray[Any]]] = field(default_factory=list)
    """Its copies before each iteration's gradient was taken."""
    clocks: list[int] = field(default_factory=list)
    """Its clock at each iteration."""
    end: list[NDArray[Any]] = field(default_factory=list)
    held: list[NDArray[Any]] = field(default_factory=list)
    late: int = 0
    clock: int = 0


@dataclass
class Case:
    """A cluster and its schedule."""

    workers: int
    servers: int
    speeds: tuple[int, ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    workers = draw(st.integers(2, 4))
    speeds = draw(st.tuples(*[st.sampled_from([0, 1, 1, 8]) for _ in range(workers)]))
    return Case(workers, draw(st.integers(1, 3)), speeds, draw(st.integers(0, 2**32)))


schedules = settings(max_examples=8, deadline=None)


def one_hot(workers: int, rank: int, iteration: int) -> torch.Tensor:
    gradient = torch.zeros(workers, ITERATIONS)
    gradient[rank, iteration] = 1.0
    return gradient


def join(actor: Actor, workers: int, policy: str | Consistency, **options: Any) -> tuple[Ledger, DistributedOptimizer]:
    """A worker's ledger and its optimizer, at rate 1 and uncompressed unless `options` say otherwise."""
    model = Ledger(workers)
    chosen: dict[str, Any] = {"codec": "fp32", "min_numel": 1, **options}
    opt = tw.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        server=actor.network.connect(actor),
        rank=actor.rank,
        workers=workers,
        consistency=policy,
        **chosen,
    )
    return model, opt


def play(case: Case, policy: str | Consistency, *, flush: bool = True, **options: Any) -> tuple[list[Diary], Network]:
    """Trains by the schedule; returns the workers' diaries, and the network with all that was said."""

    def work(actor: Actor) -> Diary:
        model, opt = join(actor, case.workers, policy, **{"reduce": "sum", **options})
        with opt:
            return write(Diary(), actor, model, opt, case.workers, flush=flush)

    network = Network(
        work, workers=case.workers, servers=case.servers, speeds=case.speeds, chance=random.Random(case.seed)
    )
    return network.run(), network


def write(
    diary: Diary, actor: Actor, model: Ledger, opt: DistributedOptimizer, workers: int, *, flush: bool = True
) -> Diary:
    while max(opt.steps_done, opt.clock) < ITERATIONS:
        iteration = opt.steps_done
        diary.clocks.append(opt.clock)
        opt.zero_grad()
        loss = model([one_hot(workers, actor.rank, iteration)] * TABLES)
        diary.seen.append(model.copies())
        actor.pause()
        loss.backward()
        opt.step()
    if flush:
        opt.flush()
    opt.sync()
    diary.end = model.copies()
    for state in opt.state_dict()["contexts"].values():
        held = state.get("accumulated")
        nothing = np.zeros((workers, ITERATIONS), np.float32)
        diary.held.append(held.numpy().copy() if isinstance(held, torch.Tensor) else nothing)
    diary.clock = opt.clock
    diary.late = int(opt.traffic().get("late_pushes", 0))
    return diary


def server_values(network: Network) -> list[NDArray[Any]]:
    """The shards' own values, in the model's order."""
    found = {table.spec.name: table.values.numpy() for core in network.cores for table in core.tables}
    return [found[f"pages.{index}.weight"] for index in range(TABLES)]


def applied(up_to: int, workers: int) -> NDArray[Any]:
    """The copy that has seen every gradient of the iterations before `up_to`, once, and no other."""
    copy = np.zeros((workers, ITERATIONS), np.float32)
    copy[:, :up_to] = -1
    return copy
