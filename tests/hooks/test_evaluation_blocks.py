"""Blocks in which a model has weights for evaluation: shared ones of local updates, averages of all steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, alone, inner_step, mlp, sgd, values, weights
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.designs import design


def test_an_average_of_shared_weights_is_everybody_s_and_one_of_local_weights_each_worker_s_own() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[torch.Tensor]:
        decay: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        averages = [AveragedModel(model, multi_avg_fn=decay) for _ in range(2)]
        for step in range(14):
            inner_step(model, opt, rank, step)
            averages[1].update_parameters(model)
            if step % 4 == 3:
                with opt.shared_weights():
                    averages[0].update_parameters(model)
        return [torch.cat([each.detach().flatten() for each in average.parameters()]) for average in averages]

    (shared, own), (other, others_own) = run_cluster(mlp, train, optimizer=adamw, design="local-sgd[h=4]")[0]
    assert torch.equal(shared, other) and not torch.equal(own, others_own)


@pytest.mark.parametrize("name", ["diloco[h=4]", "terngrad[ema=0.5]"])
def test_a_block_for_evaluation_within_another_ends_itself_alone(name: str) -> None:
    with alone(name, adamw if "diloco" in name else sgd) as (model, _, opt):
        for step in range(2):
            inner_step(model, opt, 0, step)
        block: Callable[[], AbstractContextManager[None]]
        block = opt.shared_weights if "diloco" in name else opt.averaged_weights
        opt.sync()
        before = weights(model)
        with block():
            inside = values(model)
            with block():
                assert torch.equal(values(model), inside)
            assert torch.equal(values(model), inside)
            with pytest.raises(ConfigError, match=r"state_dict\(\) inside"):
                opt.state_dict()
            with pytest.raises(ProtocolError, match="for evaluation"):
                inner_step(model, opt, 0, 2)
        assert torch.equal(weights(model), before)
        inner_step(model, opt, 0, 2)


def test_weights_are_not_averaged_over_steps_that_are_each_worker_s_own() -> None:
    with pytest.raises(ConfigError, match="ema averages the weights of all steps, and with local updates each worker"):
        replace(design("diloco[h=4]"), ema=0.9)
