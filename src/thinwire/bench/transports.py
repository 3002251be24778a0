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
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.codecs import open_frame
from thinwire.codecs.registry import codec as make_codec
from thinwire.hooks.distribute import distribute
from thinwire.jobs.run import choose_links, run_cluster
from thinwire.packets import BatchedTensor
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


PATHS: dict[str, Callable[..., float]] = {"data plane": step_frames, "model": step_model}
CELLS = tuple((path, chunks) for path in PATHS for chunks in CHUNKS)


def _median_seconds(step: Callable[[], None], steps: int) -> float:
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[len(seconds) // 5 :])


def bench(
    links: Sequence[str | None],
    *,
    workers: int = 4,
    steps: int = 100,
    rounds: int = 3,
    shaping: str = "auto",
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Measures both paths and every chunk size on every link, in turn, `rounds` times; medians are reported."""
    rows = []
    for link in links:
        seconds: dict[tuple[str, str], list[float]] = {cell: [] for cell in CELLS}
        made = choose_links(link, shaping)
        for _ in range(rounds):
            for path, chunks in CELLS:
                seconds[path, chunks].append(_once(link, shaping, workers, steps, path, CHUNKS[chunks]))
        for (path, chunks), values in seconds.items():
            row = {
                "link": str(made.rate),
                "shaping": made.shaping,
                "path": path,
                "chunks": chunks,
                "workers": workers,
                "tensors": len(SIZES),
                "bytes_per_step": 4 * sum(SIZES),
                "seconds_per_step": statistics.median(values),
                "slowest": max(values),
                "fastest": min(values),
            }
            rows.append(row)
            on_row(row)
    return rows


def _once(link: str | None, shaping: str, workers: int, steps: int, path: str, chunk_nbytes: int) -> float:
    def arguments(rank: int, addresses: list[str]) -> list[str]:
        return [
            *("bench", "data-plane-worker", "--server", f"grpc://{addresses[0]}"),
            *("--rank", str(rank), "--workers", str(workers)),
            *("--steps", str(steps), "--chunk", str(chunk_nbytes), "--path", path),
        ]

    outcomes, _ = run_cluster(choose_links(link, shaping), workers, arguments, lambda process, event: None)
    return float(statistics.median(outcome["seconds_per_step"] for outcome in outcomes.values()))
