"""Training through the parameter server, whole: hooks, cores, transports."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.server_runs import Weights, equal, mlp, one_step, parameters_of, run, steps
from thinwire.hooks.distribute import DistributedOptimizer


def test_transport_overlap_and_chunks_change_no_bit() -> None:
    for codec in ["fp32", "3lc", "int8"]:
        found, core = run_cluster(mlp, steps(6), workers=3, codec=codec)
        for options in ({"transport": "grpc"}, {"overlap": False}, {"chunk_nbytes": 1}):
            others, _ = run_cluster(mlp, steps(6), workers=3, codec=codec, **options)
            assert all(map(equal, found, others)), (codec, options)
        for table in core.tables:
            assert torch.equal(found[0][table.spec.name], torch.from_numpy(table.downlink.snapshot(0))), table.spec.name
        if codec == "3lc":
            weight = core.tables[0]
            residual = weight.values - torch.from_numpy(weight.downlink.snapshot(0))
            assert 0 < residual.abs().max() < weight.values.abs().max(), "the pull's residual: server minus workers"


def test_worker_zero_ends_the_training_for_all() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> int:
        while not opt.finished:
            if rank == 0 and opt.steps_done == 4:
                opt.stop_after_this_step()
            one_step(model, opt, rank, opt.steps_done)
        opt.sync()
        return opt.steps_done

    assert run_cluster(mlp, train, workers=3)[0] == [5, 5, 5]


def test_different_replicas_raise() -> None:
    """TernGrad's workers update by themselves; a hash tells where one of them went astray."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for step in range(101):
            if step == 50 and rank == 1:
                with torch.no_grad():
                    next(model.parameters())[0, 0] += 1e-3
            one_step(model, opt, rank, step)

    with pytest.raises(tw.ProtocolError, match=r"worker [01]: its model differs from worker [01]'s before step 100"):
        run(train, design="terngrad")


# ---- consistency: when gradients travel


@pytest.mark.parametrize("policy", ["local[3]", "ssp[2]", "adaptive[period,threshold=3]", "bsp", "asp", "backup[1]"])
def test_flush_sends_only_accumulated_gradients(policy: str) -> None:
    accumulates = policy not in ("bsp", "asp", "backup[1]")

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[Weights, bool]:
        def waits() -> bool:
            return any("accumulated" in context for context in opt.state_dict()["contexts"].values())

        steps(4)(rank, model, opt)
        before, clock, waited = parameters_of(model), opt.clock, waits()
        opt.flush()
        assert waited == accumulates and not waits()
        return parameters_of(model), equal(before, parameters_of(model)) and opt.clock == clock

    results, _ = run(train, codec="fp32", consistency=policy)
    assert [unchanged for _, unchanged in results] == [not accumulates] * 2
    assert not accumulates or equal(results[0][0], results[1][0])
