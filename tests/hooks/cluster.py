"""A whole cluster in one process: one server core, N workers as threads, any transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection, Server
from thinwire.transports.grpc import server as grpc_server
from thinwire.transports.memory import MemoryServer

Train = Callable[[int, nn.Module, DistributedOptimizer], Any]


def start_server(core: ServerCore, transport: str) -> tuple[Server, Callable[[], str | Connection]]:
    """Returns a running server and a function that connects each worker to it."""
    if transport == "memory":
        memory = MemoryServer(serving(core))
        return memory, memory.connect
    server = grpc_server.serve(serving(core), "127.0.0.1:0")
    return server, lambda: f"grpc://{server.address}"


def again(core: ServerCore) -> ServerCore:
    """Returns a shard that resumes from another shard's current state."""
    fresh = ServerCore()
    fresh.load_state_dict(core.state_dict())
    return fresh


def run_cluster(
    make_model: Callable[[int], nn.Module],
    train: Train,
    *,
    workers: int = 2,
    transport: str = "memory",
    optimizer: Callable[[nn.Module], torch.optim.Optimizer | list[torch.optim.Optimizer]] = lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1
    ),
    core: ServerCore | None = None,
    **options: Any,
) -> tuple[list[Any], ServerCore]:
    """Trains on every rank and returns the results of `train`, by rank. Raises the first failure of a worker."""
    core = core or ServerCore()
    server, address = start_server(core, transport)
    results: list[Any] = [None] * workers
    failures: list[tuple[int, BaseException]] = []
    # Torch has one random generator in a process, and a checkpointed forward pass of one worker would set it back while
    # another seeds it and builds: all are built before anyone trains.
    models = [make_model(rank) for rank in range(workers)]

    def work(rank: int) -> None:
        try:
            model = models[rank]
            opt = tw.distribute(
                model, optimizer(model), server=address(), rank=rank, workers=workers, **{"timeout": 30, **options}
            )
            with opt:
                results[rank] = train(rank, model, opt)
        except BaseException as error:
            failures.append((rank, error))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    with server:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0][1]
    return results, core
