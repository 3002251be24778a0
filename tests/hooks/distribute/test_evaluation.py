"""Evaluation with `tw.distribute`: shared or averaged weights beside torch's `AveragedModel`, and inference mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, sgd, values, weights
from tests.hooks.server_runs import Weights, equal, loss_of, run, steps, weights_of
from tests.hooks.server_runs import mlp as layers
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.designs import Design
from thinwire.policies.designs import design as find_design


def test_averages_of_shared_weights_are_equal_and_of_local_weights_each_worker_s_own() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[torch.Tensor]:
        decay: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        averages = [AveragedModel(model, multi_avg_fn=decay) for _ in range(2)]
        for step in range(14):
            inner_step(model, opt, rank, step)
            averages[1].update_parameters(model)
            if step % 4 == 3:
                with opt.shared_weights():
                    averages[0].update_parameters(model)
        return [weights(average) for average in averages]

    (shared, own), (other, others_own) = run_cluster(mlp, train, optimizer=adamw, design="local-sgd[h=4]")[0]
    assert torch.equal(shared, other) and not torch.equal(own, others_own)
    with pytest.raises(ConfigError, match="ema averages the weights of all steps"):
        replace(find_design("diloco[h=4]"), ema=0.9)


@pytest.mark.parametrize(
    "design",
    ["streaming-diloco[h=4,fragments=2,delay=1]", "local-sgd[h=1,keep=0.5,steer=0]", "local-sgd[h=2]", "terngrad"],
)
def test_inference_mode_changes_no_bit(design: str) -> None:
    """The forward pass that first takes an update may be one of an evaluation."""

    def final(inference: bool) -> Any:
        def work(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
            for step in range(6):
                inner_step(model, opt, rank, step)
                with torch.inference_mode(inference), torch.no_grad():
                    model(batch(rank, step)[0])
            opt.flush()
            return values(model)

        return run_cluster(mlp, work, optimizer=sgd if design == "terngrad" else adamw, design=design)[0]

    assert torch.equal(final(True)[0], final(False)[0])


FP32 = tw.codec("fp32")


def make_norm(rank: int) -> nn.Module:
    first, relu, last = layers(rank).children()
    return nn.Sequential(first, nn.BatchNorm1d(40), relu, last)


def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
    """Trains beside torch's average; a checkpoint in the middle holds the average so far."""
    average: Any = get_ema_multi_avg_fn(0.75)  # type: ignore[no-untyped-call]
    expected = AveragedModel(make_norm(0), multi_avg_fn=average, use_buffers=True)
    for step in range(5):
        if step == 3:
            state = opt.state_dict()
            opt.load_state_dict({**state, "averages": {}})
            opt.load_state_dict(state)
        opt.zero_grad()
        loss = loss_of(model, rank, step)
        expected.update_parameters(model)
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()
    opt.sync()
    trained = weights_of(model)
    expected.update_parameters(model)
    with opt.averaged_weights():
        averaged = weights_of(model)
    assert equal(weights_of(model), trained)
    for name, value in expected.module.state_dict().items():
        assert torch.equal(value, averaged[name]) or name.endswith("num_batches_tracked"), name
    assert not torch.equal(averaged["0.weight"], trained["0.weight"])
    return trained


def test_averaged_weights_are_those_of_torchs_averaged_model_and_do_not_change_the_training() -> None:
    for policy in ("bsp", "ssp[2,mode=aggressive]"):
        averages = Design(name="fp32", up=FP32, down=FP32, ema=0.75, consistency=policy)
        [trained, _], _ = run(train, model=make_norm, design=averages)
        if policy == "bsp":
            [plain, _], _ = run(steps(5), model=make_norm, design=replace(averages, ema=0.0))
            assert all(torch.equal(trained[name], value) for name, value in plain.items())
    with pytest.raises(tw.ConfigError, match="'3lc' averages no weights"):
        run(train, model=make_norm, workers=1, design="3lc")
