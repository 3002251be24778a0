"""`flush()` of local updates: it ends a round early, sends what waits, and pushes nothing twice."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster, start_server
from tests.hooks.local_runs import adamw, inner_step, mlp, steps, values
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.server.core import ServerCore

WORKERS = 2
PLAIN = "outer_lr=1,outer_momentum=0,nesterov=false,codec_down=fp32"


@pytest.mark.parametrize("design", ["streaming-diloco[h=6,fragments=3,delay=1]", "local-sgd[h=4]"])
@pytest.mark.parametrize("at", [8, 9, 11])
def test_a_flush_in_the_middle_ends_a_round_early_on_all_workers(design: str, at: int) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor]:
        early = steps(at)(rank, model, opt)
        return early, steps(20, first=at)(rank, model, opt)

    [one, other], _ = run_cluster(mlp, train, workers=WORKERS, optimizer=adamw, design=design)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) and not torch.equal(one[0], one[1])


@pytest.mark.parametrize(
    "base",
    [
        "update[codec_down=fp32,{}]",
        "local-sgd[h=3,codec_down=fp32,{}]",
        f"streaming-diloco[h=6,fragments=3,delay=2,{PLAIN},{{}}]",
    ],
)
def test_a_flush_settles_what_waits_in_residuals(base: str) -> None:
    """Sent and waiting changes keep their sum, and each settling exchange leaves less waiting."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor, int]:
        found = steps(5)(rank, model, opt)
        return found, opt.state_dict()["contexts"]["0.weight"]["residual"].flatten().clone(), opt.clock

    waits, all_in_all, exchanges = [], [], []
    for settle in (0, 1, 4):
        found, _ = run_cluster(mlp, train, workers=3, optimizer=adamw, design=base.format(f"settle={settle}"))
        assert all(torch.equal(each, found[0][0]) for each, _, _ in found)
        unsent = torch.stack([residual for _, residual, _ in found])
        waits.append(float(unsent.norm()))
        all_in_all.append(found[0][0][: unsent.shape[1]] - unsent.mean(0))
        exchanges.append(found[0][2])
    assert 0 < waits[2] < 0.5 * waits[1] < 0.5 * waits[0]
    torch.testing.assert_close(all_in_all[1:], [all_in_all[0]] * 2, rtol=1e-5, atol=1e-6)
    assert [each - exchanges[0] for each in exchanges] == [0, 1, 4]


@pytest.mark.parametrize("stop", [7, 8, 9, 10])
def test_a_round_that_ends_before_a_delayed_answer_was_due_pushes_nothing_twice(stop: int) -> None:
    """The push after six steps reaches the shared parameters once, or waits in the residual."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor]:
        weight = model.get_parameter("0.weight")
        began = weight.detach().clone()
        for step in range(stop):
            opt.zero_grad()
            (weight * -direction * 2.0**step).sum().backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.flush()
        return weight.detach() - began, opt.state_dict()["contexts"]["0.weight"]["residual"].view(weight.shape)

    def whole_steps(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    direction = torch.rand(mlp(0).get_parameter("0.weight").shape) + 0.1
    design = f"diloco[h=6,delay=4,codec=topk,fraction=0.1,settle=0,{PLAIN}]"
    [(moved, waits)], _ = run_cluster(mlp, train, workers=1, optimizer=whole_steps, design=design)
    assert float(waits.abs().max()) > 0
    torch.testing.assert_close(moved - waits, (2.0**6 - 1) * direction, rtol=1e-5, atol=1e-4)


def test_a_worker_that_joins_in_the_round_of_a_flush_and_the_others_do_not_wait_for_each_other() -> None:
    """Those who have flushed are in the middle of a round, and who joins is at the beginning of one."""
    server, address = start_server(ServerCore(min_workers=WORKERS), "memory")
    met, joined, found = threading.Barrier(WORKERS + 1), threading.Event(), list[torch.Tensor]()

    def live(rank: int) -> None:
        model, at = mlp(rank), 8
        if rank == WORKERS:
            met.wait(20)
        place: dict[str, Any] = {"server": address(), "rank": rank, "workers": WORKERS, "timeout_s": 15}
        with tw.distribute(model, adamw(model), design="streaming-diloco[h=6]", **place) as opt:
            if rank == WORKERS:
                assert (opt.steps_done, opt.clock) == (12, 2)
                joined.set()
            while opt.clock < 5:
                if rank < WORKERS and opt.steps_done == at:
                    at = -1
                    met.wait(20)
                    joined.wait(20)
                    opt.flush()
                inner_step(model, opt, rank, opt.steps_done)
            opt.flush()
            found.append(values(model))

    with server, ThreadPoolExecutor(WORKERS + 1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for future in [pool.submit(live, rank) for rank in range(WORKERS + 1)]:
            future.result()
    assert all(torch.equal(each, found[0]) for each in found)
