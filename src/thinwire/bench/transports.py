"""What a step costs when there is nothing to compute: 30 small tensors up, aggregated, updated, and down again.

Two paths, both real. The *data plane*: every worker pushes gradients that are ready, which travel over gRPC, are
averaged and taken as a step by the server's optimizer; what changed is encoded, comes down and is applied. The
*model* path is what training does: torch's autograd, our hooks and codec contexts come before that.
The chunk size is the design parameter: a message per tensor, a few chunks, or one message for the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from thinwire.bench.harness import Bench, Figures, Measured, Role, Stage, Tell, milliseconds
from thinwire.codecs import open_frame
from thinwire.codecs.registry import codec as make_codec
from thinwire.engines.events import Event
from thinwire.engines.links import parse_rate
from thinwire.hooks.distribute import distribute
from thinwire.jobs.cluster import choose_links, run_cluster
from thinwire.jobs.events import Served
from thinwire.packets import BatchedTensor
from thinwire.runtime.connect import connect
from thinwire.runtime.driver import WorkerDriver
from thinwire.schema import Plan, TableSpec
from thinwire.transports.base import Connection
from thinwire.worker.conversation import Conversation

WHOLE_STEP = 1 << 40
CHUNKS = {"a message per tensor": 1, "chunks of 32 kB": 32 * 1024, "one message": WHOLE_STEP}
SIZES = tuple(round(75 * (5000 / 75) ** (index / 29) * 0.826) for index in range(30))
"""Values per tensor: 62 to 4,130, that is 0.25 to 16.5 kB, 146 kB together."""


class Layers(nn.Module):
    """Thirty layers that only hand their weights on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(size) for size in SIZES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean()


def step_frames(connection: Connection, *, rank: int, workers: int, steps: int, chunk_nbytes: int) -> float:
    """Takes steps with gradients that are ready; returns the median of their seconds."""
    codec = make_codec("fp32")
    plan = Plan(
        workers=workers,
        tables=tuple(TableSpec(name=f"layers.{i}.weight", shape=(size, 1)) for i, size in enumerate(SIZES)),
        codecs=(codec.config(),),
        optimizer="SGD",
        groups=({},),
    )
    values = [np.ones(size, np.float32) for size in SIZES]
    gradients = [np.full(size, 1e-3, np.float32) for size in SIZES]
    conversation = Conversation(0, plan, rank=rank, chunk_nbytes=chunk_nbytes)
    driver = WorkerDriver([conversation], [connection])
    clock, rates = 0, (1e-2,)

    def pull() -> None:
        for index, copy in enumerate(values):
            for update in driver.run(conversation.pull(index, clock)):
                if isinstance(update.frame, BatchedTensor):
                    update.frame.unpack(copy, accumulate=True)
                else:
                    open_frame(update.frame).decode_flat(copy, accumulate=True)

    driver.run(conversation.join())
    if conversation.asked_for_values:
        driver.run(conversation.send_values(tuple(codec.encode(copy.reshape(-1, 1)) for copy in values)))
    pull()

    def step() -> None:
        nonlocal clock
        for index in reversed(range(len(SIZES))):  # as gradients become ready
            if conversation.push(clock, index, BatchedTensor.of(gradients[index], plan.tables[index].name)):
                driver.run(conversation.flush(clock, rates))
        driver.run(conversation.flush(clock, rates))
        conversation.end_step()
        clock += 1
        pull()

    seconds = _median_seconds(step, steps)
    driver.close()
    return seconds


def step_model(connection: Connection, *, rank: int, workers: int, steps: int, chunk_nbytes: int) -> float:
    """Takes steps of a model through `distribute`; returns the median of their seconds."""
    torch.set_num_threads(1)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with distribute(
        model, optimizer, server=connection, rank=rank, workers=workers, codec="fp32", chunk_nbytes=chunk_nbytes
    ) as opt:

        def step() -> None:
            opt.zero_grad()
            model(torch.zeros(1)).backward()
            opt.step()
            opt.sync()

        return _median_seconds(step, steps)


def _median_seconds(step: Callable[[], None], steps: int) -> float:
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[len(seconds) // 5 :])


PATHS: dict[str, Callable[..., float]] = {"data plane": step_frames, "model": step_model}


class Stepped(Event, frozen=True, kw_only=True):
    """A worker has taken its steps; the median of their seconds."""

    seconds_per_step: float


class TransportsWorker(Role, frozen=True, kw_only=True):
    """One worker of a cell."""

    server: str
    rank: int
    workers: int
    steps: int
    path: str
    chunk_nbytes: int

    def play(self, stage: Stage) -> None:
        """Takes the steps and reports their median."""
        seconds = PATHS[self.path](
            connect(self.server, options=stage.transport),
            rank=self.rank,
            workers=self.workers,
            steps=self.steps,
            chunk_nbytes=self.chunk_nbytes,
        )
        stage.report(Stepped(seconds_per_step=seconds))


@dataclass(frozen=True)
class Cell:
    """One run of one path, with messages of one size, on one link."""

    link: str
    path: str
    chunks: str
    workers: int
    steps: int
    wanted: str

    def __str__(self) -> str:
        return f"{self.link}, {self.path}, {self.chunks}"


class Step(Figures, frozen=True, kw_only=True):
    """Median over the workers of their median step, and who shaped the link."""

    seconds_per_step: float
    shaping: str
    tensors: int = len(SIZES)
    bytes_per_step: int = 4 * sum(SIZES)


@dataclass(kw_only=True)
class TransportsBench(Bench[Cell, Step]):
    """Both paths and every size of messages on every link, in turn.

    Args:
        links: rates; `none` is no limit.
        workers: how many.
        steps: of each run; the first fifth is not counted.
        rounds: runs of each cell.
        shaping: see `choose_links`.
    """

    links: Sequence[str] = ("none", "100mbit")
    workers: int = 4
    steps: int = 200
    rounds: int = 3
    shaping: str = "auto"

    kinds = (Step,)
    left = 4
    columns = (
        ("link", lambda cell, runs: cell.link),
        ("shaped by", lambda cell, runs: runs[0].shaping),
        ("path", lambda cell, runs: cell.path),
        ("messages", lambda cell, runs: cell.chunks),
        *milliseconds("ms a step", "seconds_per_step"),
    )

    def cells(self) -> list[Cell]:
        return [
            Cell(str(parse_rate(link)), path, chunks, self.workers, self.steps, self.shaping)
            for link in self.links
            for path in PATHS
            for chunks in CHUNKS
        ]

    def thin_link(self) -> tuple[str | None, str]:
        return next((link for link in self.links if parse_rate(link).bps is not None), None), self.shaping

    def measure(self, cell: Cell, before: Measured[Cell, Step], tell: Tell) -> Step:
        links, seconds = choose_links(cell.link, cell.wanted), list[float]()

        def command(rank: int, addresses: list[str]) -> list[str]:
            return TransportsWorker(
                server=f"grpc://{addresses[0]}",
                rank=rank,
                workers=cell.workers,
                steps=cell.steps,
                path=cell.path,
                chunk_nbytes=CHUNKS[cell.chunks],
            ).command()

        def collect(process: str, event: Event) -> None:
            if isinstance(event, Stepped):
                seconds.append(event.seconds_per_step)

        run_cluster(links, cell.workers, command, [Stepped, Served], collect)
        return Step(seconds_per_step=statistics.median(seconds), shaping=links.shaping)
