"""Evaluation with `tw.distribute`: blocks with shared or averaged weights, averages by torch, inference mode."""

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
from tests.hooks.local_runs import adamw, alone, batch, inner_step, mlp, sgd, values, weights
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
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


def test_evaluation_block_inside_another_ends_itself_alone() -> None:
    for name in ("diloco[h=4]", "terngrad[ema=0.5]"):
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
