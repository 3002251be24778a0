"""What a step costs the server: CPU seconds of its process, by design and number of workers, on an unlimited link.

Strategy: the shard, its transport and the sessions are the real ones. Only the workers are replaced, by one process
that plays them all with frames made beforehand from a model's real gradients and never decodes what comes down; so
sixteen workers fit on a machine whose cores the server needs. CPU seconds are the kernel's for the server's process,
all its threads together, from the end of the first steps to that of the last: other work on the machine does not count.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import torch

from thinwire.bench.harness import Bench, Figures, Measured, Role, Stage, Tell, median, milliseconds
from thinwire.bench.inputs import training
from thinwire.bench.options import ServerOptions
from thinwire.bench.transports import Player
from thinwire.engines.events import Event
from thinwire.errors import ConfigError
from thinwire.hooks.planning import Planned, make_plan
from thinwire.jobs.cluster import Place, Roles, choose_links, run_cluster
from thinwire.jobs.events import Listening
from thinwire.jobs.job import Job
from thinwire.jobs.training import warm_up
from thinwire.policies.consistency import Bsp
from thinwire.policies.designs import design as find_design
from thinwire.quantities import nbytes_text
from thinwire.runtime.connection import connect
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.base import Handler, Server
from thinwire.transports.grpc import server as grpc_server

SETS = 8
"""Different gradients, of so many steps of one worker; the workers take them in turn, each beginning with another."""
WARM = 5
"""Steps before the measurement: the first ones load kernels and fill buffers."""


@dataclass(frozen=True)
class ServerCell:
    """One run of one design with so many workers."""

    workers: int
    design: str
    model: str
    data: str
    steps: int

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.design}"


class Cost(Figures, frozen=True, kw_only=True):
    """CPU seconds of the server's process per step; bytes per step up and down, all workers together."""

    cpu_seconds_per_step: float
    bytes_per_step: int


@dataclass(kw_only=True)
class ServerBench(ServerOptions, Bench[ServerCell, Cost]):
    """Every design with every number of workers, in turn.

    Args:
        workers: how many.
        designs: the first is what the others are held against.
        model: without buffers.
        data: its data set.
        steps: of each run; the first `WARM` are not counted.
        rounds: runs of each cell.
    """

    kinds = (Cost,)
    serves = True
    left = 2
    columns = (
        ("workers", lambda cell, runs: str(cell.workers)),
        ("design", lambda cell, runs: cell.design),
        *milliseconds("CPU ms a step", "cpu_seconds_per_step"),
        ("traffic a step", lambda cell, runs: nbytes_text(runs[0].bytes_per_step)),
    )

    def __post_init__(self) -> None:
        if self.steps <= WARM:
            raise ConfigError(f"{self.steps} steps; more than {WARM} are needed, which are not counted")
        for name in self.designs:
            find_design(name)

    def cells(self) -> list[ServerCell]:
        return [
            ServerCell(workers, design, self.model, self.data, self.steps)
            for workers in self.workers
            for design in self.designs
        ]

    def measure(self, cell: ServerCell, before: Measured[ServerCell, Cost], tell: Tell) -> Cost:
        costs: list[Cost] = []

        def load(_rank: int, addresses: list[str], _again: bool) -> list[str]:
            return ServerLoad(server=f"grpc://{addresses[0]}", cell=cell).command()

        def collect(process: str, event: Event) -> None:
            if isinstance(event, Counted):
                costs.append(event.cost)

        shard = ServerShard(steps=cell.steps).command()
        roles = Roles(workers=1, worker=load, server=lambda _index, _again: shard)
        run_cluster(roles, Place(links=choose_links(None)), [Counted], collect)
        [cost] = costs
        return cost

    def compared(self, cell: ServerCell, measured: Measured[ServerCell, Cost]) -> dict[str, float | None]:
        """CPU seconds over those of the first design, and how they grow with the workers.

        The growth is CPU seconds over those with the fewest workers, divided by how many times as many workers there
        are: up to 1 they grow no worse than linearly.
        """
        fewest = min(self.workers)

        def over(other: ServerCell) -> float | None:
            own, base = (measured.get(each) for each in (cell, other))
            return median(own, "cpu_seconds_per_step") / median(base, "cpu_seconds_per_step") if own and base else None

        cost, growth = over(replace(cell, design=self.designs[0])), over(replace(cell, workers=fewest))
        return {
            f"of {self.designs[0]}": cost,
            "growth / workers": None if growth is None else growth * fewest / cell.workers,
        }


class Counted(Event, frozen=True, kw_only=True):
    """The server has served; what its steps cost."""

    cost: Cost


class ServerShard(Role, frozen=True, kw_only=True):
    """The server of a cell."""

    steps: int

    def play(self, stage: Stage) -> None:
        """Serves one training and reports what its steps from `WARM` to `steps` cost."""
        core, ended = ServerCore(), threading.Event()
        marks: dict[int, tuple[float, int]] = {}
        running: list[Server] = []
        inner = serving(core, ended.set)

        def mark() -> None:
            if core.step not in marks and running:
                marks[core.step] = time.process_time(), running[0].bytes_received + running[0].bytes_sent

        with grpc_server.serve(
            lambda sender: _Marking(inner(sender), mark), stage.listen, options=stage.transport
        ) as server:
            running.append(server)
            stage.report(Listening(address=server.address))
            ended.wait()
        if core.failed is not None:
            raise ConfigError(f"the load does not fit the server: {core.failed}")
        (before, sent), (after, sent_after) = marks[WARM], marks[self.steps]
        steps = self.steps - WARM
        cost = Cost(cpu_seconds_per_step=(after - before) / steps, bytes_per_step=(sent_after - sent) // steps)
        stage.report(Counted(cost=cost))


class _Marking:
    """A handler that calls `mark` after each packet."""

    def __init__(self, inner: Handler, mark: Callable[[], None]) -> None:
        self._inner, self._mark = inner, mark
        self.opened, self.closed = inner.opened, inner.closed

    def received(self, peer: int, packet: bytes) -> None:
        self._inner.received(peer, packet)
        self._mark()


class ServerLoad(Role, frozen=True, kw_only=True):
    """All the workers of a cell."""

    server: str
    cell: ServerCell

    def play(self, stage: Stage) -> None:
        """Pushes frames that are ready and waits for every table's update, step by step.

        Raises:
            ConfigError: a design that needs the workers' part of the arithmetic, or a model with buffers.
        """
        torch.set_num_threads(1)
        cell = self.cell
        planned, sets = make_frames(cell.design, model=cell.model, data=cell.data, workers=cell.workers)
        [plan] = planned.plans
        first = find_design("fp32").up
        values = lambda: tuple(first.encode(each.tensor.detach()) for each in planned.tensors)  # noqa: E731
        players = [
            Player(connect(self.server, connect_timeout_s=60), plan, rank, values) for rank in range(cell.workers)
        ]
        rates = tuple(1e-3 for _ in plan.groups)
        for player in players:
            deque(player.pull(0), maxlen=0)
        for step in range(cell.steps):
            for player in players:
                player.push(step, sets[(step + player.rank) % SETS].__getitem__, rates)
            for player in players:
                deque(player.pull(step + 1), maxlen=0)
        for player in players:
            player.close()


def make_frames(design: str, *, model: str, data: str, workers: int) -> tuple[Planned, list[list[bytes]]]:
    """Returns the plan and `SETS` lists of frames, one frame for each table, of a model's first gradients.

    Raises:
        ConfigError: a design or a model whose workers do more than push and pull.
    """
    made = find_design(design)
    if made.downlink == "weights" or made.share_scales:
        raise ConfigError(
            f"{design}: its workers do more than push frames; measure a design that pulls deltas or gradients"
        )
    network, optimizer, gradients = training(Job(design=design, model=model, data=data, workers=workers))
    planned = make_plan(network, optimizer, made, workers=workers, consistency=Bsp())
    if any(tensor.state for tensor in planned.tensors):
        raise ConfigError(f"{model} has buffers, which travel by other rules; measure a model without them")
    warm_up(made.up)
    contexts = [each.up.context(each.tensor.detach()) for each in planned.tensors]
    sets = [
        [context.encode(gradient) for context, gradient in zip(contexts, step, strict=True)]
        for step in islice(gradients, SETS)
    ]
    return planned, sets
