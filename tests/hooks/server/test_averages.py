"""Averaged weights (`ema`) of the server mode, beside torch's own `AveragedModel`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire as tw
from tests.hooks.server_runs import Weights, equal, loss_of, mlp, run, steps, weights_of
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.designs import Design

FP32 = tw.codec("fp32")


def make_norm(rank: int) -> nn.Module:
    first, relu, last = mlp(rank).children()
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
