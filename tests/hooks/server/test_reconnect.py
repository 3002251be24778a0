"""Connections cut in the middle of steps, by a real proxy: the weights are those of a run that nothing disturbed."""

from __future__ import annotations

import threading
from typing import Any

import torch

import thinwire as tw
from tests.hooks.server_runs import equal, mlp, steps
from tests.runtime.proxy import Proxy
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.grpc import server as grpc_server

WORKERS = 2


def train(cuts: list[int], *, shards: int = 1, **options: Any) -> tuple[list[Any], int]:
    """Worker 1 reaches every shard through a proxy; returns the weights (or failures), and how often it was cut."""
    cores = [ServerCore() for _ in range(shards)]
    servers = [grpc_server.serve(serving(core, grace_s=30.0), "127.0.0.1:0") for core in cores]
    proxies = [Proxy(server.address, cuts) for server in servers]
    results: list[Any] = [None] * WORKERS

    def work(rank: int) -> None:
        model = mlp(rank)
        ways = [each.address for each in (proxies if rank else servers)]
        try:
            with tw.distribute(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                server=[f"grpc://{way}" for way in ways],
                rank=rank,
                workers=WORKERS,
                timeout_s=60,
                chunk_nbytes=256,
                **options,
            ) as opt:
                results[rank] = steps(12)(rank, model, opt)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in servers:
        server.stop()
    for proxy in proxies:
        proxy.close()
    assert all(core.failed is None for core in cores), [core.failed for core in cores]
    return results, sum(proxy.done for proxy in proxies)


def test_cut_connections_leave_no_trace_in_the_weights() -> None:
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {"codec": "3lc", "sparsity": 1.75, "min_numel": 50}),
        (2, {"codec": "3lc", "sparsity": 1.0, "min_numel": 50, "placement": "round-robin"}),
        (1, {"design": "doublesqueeze-1bit"}),
    ]
    for shards, options in cases:
        undisturbed, none = train([], shards=shards, **options)
        disturbed, cut = train([1800, 600, 400], shards=shards, **options)
        assert none == 0 and cut == 3 * shards
        for result in disturbed:
            assert isinstance(result, dict), result
            assert equal(result, undisturbed[0]), options
