"""What a step costs when there is nothing to compute: 30 small tensors up, aggregated, updated, and down again.

The whole path is real: hooks, frames, gRPC, server core, torch's SGD. Only the model is as cheap as one can be.
The chunk size is the design parameter: a message per tensor, a few chunks, or one message for the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from thinwire.hooks.distribute import distribute
from thinwire.studies.experiment import choose_links, run_cluster
from thinwire.transports.base import Connection

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


def run_worker(
    server: str | Connection,
    *,
    rank: int,
    workers: int,
    steps: int,
    chunk_nbytes: int,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Takes `steps` steps and reports the median of their seconds."""
    torch.set_num_threads(1)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seconds = []
    with distribute(
        model, optimizer, server=server, rank=rank, workers=workers, codec="fp32", chunk_nbytes=chunk_nbytes
    ) as opt:
        for _ in range(steps):
            begin = time.perf_counter()
            opt.zero_grad()
            model(torch.zeros(1)).backward()
            opt.step()
            opt.sync()
            seconds.append(time.perf_counter() - begin)
    report({"event": "done", "rank": rank, "seconds_per_step": statistics.median(seconds[len(seconds) // 5 :])})


def bench(
    links: Sequence[str | None],
    *,
    workers: int = 4,
    steps: int = 100,
    rounds: int = 3,
    shaping: str = "auto",
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Measures every chunk size on every link, in turn, `rounds` times; medians are reported."""
    rows = []
    for link in links:
        seconds: dict[str, list[float]] = {name: [] for name in CHUNKS}
        made = choose_links(link, shaping)
        for _ in range(rounds):
            for name, chunk_nbytes in CHUNKS.items():
                seconds[name].append(_once(link, shaping, workers, steps, chunk_nbytes))
        for name, values in seconds.items():
            row = {
                "link": str(made.rate),
                "shaping": made.shaping,
                "chunks": name,
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


def _once(link: str | None, shaping: str, workers: int, steps: int, chunk_nbytes: int) -> float:
    def arguments(rank: int, addresses: list[str]) -> list[str]:
        return [
            *("bench", "data-plane-worker", "--server", f"grpc://{addresses[0]}"),
            *("--rank", str(rank), "--workers", str(workers)),
            *("--steps", str(steps), "--chunk", str(chunk_nbytes)),
        ]

    outcomes, _ = run_cluster(choose_links(link, shaping), workers, arguments, lambda process, event: None)
    return float(statistics.median(outcome["seconds_per_step"] for outcome in outcomes.values()))
