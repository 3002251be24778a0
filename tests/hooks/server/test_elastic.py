"""Workers that die, come back or lose their connection while others train on, with real models."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import start_server
from tests.hooks.server_runs import equal, steps
from tests.hooks.server_runs import mlp as plain
from tests.runtime.proxy import Proxy
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.sampler import ElasticSampler
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.grpc import server as grpc_server

STEPS, DIES_AT, WORKERS, EXAMPLES = 24, 6, 3, 1000


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 4))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 8, generator=chance), torch.randint(4, (16,), generator=chance)


class Life:
    """One worker's process, as a thread: it trains to the last step, or dies at one."""

    def __init__(
        self,
        address: Any,
        rank: int,
        design: str,
        dies_at: int | None = None,
        carries: dict[str, Any] | None = None,
    ) -> None:
        self.rank, self.joined_at, self.weights = rank, -1, [torch.empty(0)]
        self.error: BaseException | None = None
        self.reached = threading.Event()
        self.read: dict[int, list[int]] = {}
        self.traffic, self.state = dict[str, float](), dict[str, Any]()
        self._carries = carries
        self._dies_at, self._address, self._design = dies_at, address, design
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), f"worker {self.rank} hangs"
        if self.error is not None:
            raise self.error

    def _live(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error
        finally:
            self.reached.set()

    def _train(self) -> None:
        connection, model = self._address(), mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        opt = tw.distribute(
            model, inner, server=connection, rank=self.rank, workers=WORKERS, design=self._design, timeout=30
        )
        self.joined_at = opt.steps_done
        if self._carries is not None:
            opt.load_residuals(self._carries)
            assert opt.steps_done == self.joined_at
            loaded = opt.state_dict()["contexts"]["0.weight"]["residual"]
            assert torch.equal(loaded, self._carries["contexts"]["0.weight"]["residual"])
        examples = iter(ElasticSampler(EXAMPLES, opt, batch=4))
        while opt.steps_done < STEPS:
            if opt.steps_done == self._dies_at:
                opt.sync()
                self.state = opt.state_dict()
                connection.abort()
                return
            self.read[opt.steps_done] = next(examples)
            x, y = batch(self.rank, opt.steps_done)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.flush()
        self.traffic = opt.traffic()
        self.weights = [p.detach().clone() for p in model.parameters()]
        opt.close()


def join(*lives: Life) -> None:
    """Waits for the end of all, which all have the same weights at."""
    for life in lives:
        life.join()
    for life in lives[1:]:
        assert all(map(torch.equal, life.weights, lives[0].weights)), f"worker {life.rank} differs"


def after_a_death(design: str, rank: int = 1, *, carries: bool = False) -> tuple[ServerCore, list[Life], Life]:
    """Worker 1 dies, and the rank given comes in its place; returns all that end, and the one that died."""
    core = ServerCore(min_workers=WORKERS)  # the others wait, so that it is back in the middle of the training
    server, address = start_server(core, "memory")
    with server, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = [Life(address, each, design, DIES_AT if each == 1 else None) for each in range(WORKERS)]
        first[1].join()
        lives = [first[0], Life(address, rank, design, carries=first[1].state if carries else None), first[2]]
        join(*lives)
    assert core.finished and core.failed is None
    assert any("worker 1 went away" in str(each.message) for each in said)
    return core, lives, first[1]


@pytest.mark.parametrize(
    ("design", "carries"), [("3lc", False), ("3lc", True), ("local2", False), ("local-sgd[h=3]", False), ("mps", False)]
)
def test_killed_worker_rejoins_and_loses_residuals_without_checkpoint(design: str, carries: bool) -> None:
    _, [_, back, _], _ = after_a_death(design, carries=carries)
    assert DIES_AT - 6 <= back.joined_at < STEPS, "it joins at the other workers' step"
    if design == "3lc":
        lost, carried = (back.traffic.get(name, 0) for name in ("residuals_lost", "residuals_carried"))
        assert (lost, carried) == ((0, 2) if carries else (2, 0)), "of the two weights; the rest travels uncompressed"


def test_extra_rank_joins_and_shares_data() -> None:
    core, lives, died = after_a_death("3lc", WORKERS + 1)
    assert core.tables[0].version == STEPS
    lives[1].read = {step: rows for step, rows in lives[1].read.items() if step >= lives[1].joined_at + 2}
    everything = [row for life in (*lives, died) for rows in life.read.values() for row in rows]
    assert len(lives[1].read) > 10 and len(set(everything)) == len(everything), "each example is read by one worker"


def test_extra_rank_without_elastic_server_raises() -> None:
    server, address = start_server(ServerCore(), "memory")
    with server:
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ProtocolError, match="rank 3; this training has ranks 0 … 2"):
            tw.distribute(model, sgd, server=address(), rank=3, workers=3)
        with tw.distribute(model, sgd, server=address(), workers=1) as opt:
            examples = iter(ElasticSampler(EXAMPLES, opt, batch=4))
            next(examples)
            with pytest.raises(ConfigError, match="second batch for step 0"):
                next(examples)


def train(cuts: list[int], *, shards: int = 1, **options: Any) -> tuple[list[Any], int]:
    """Worker 1 reaches every shard through a proxy; returns the weights (or failures), and how often it was cut."""
    cores = [ServerCore() for _ in range(shards)]
    servers = [grpc_server.serve(serving(core, grace_s=30.0), "127.0.0.1:0") for core in cores]
    proxies = [Proxy(server.address, cuts) for server in servers]
    results: list[Any] = [None] * 2

    def work(rank: int) -> None:
        model = plain(rank)
        ways = [each.address for each in (proxies if rank else servers)]
        try:
            with tw.distribute(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                server=[f"grpc://{way}" for way in ways],
                rank=rank,
                workers=2,
                timeout=60,
                chunk_nbytes=256,
                **options,
            ) as opt:
                results[rank] = steps(12)(rank, model, opt)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
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


def test_cut_connections_keep_weights_bit_identical() -> None:
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
