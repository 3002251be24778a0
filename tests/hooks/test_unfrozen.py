"""Parameters that are unfrozen after the model was distributed: nobody exchanges them, and that is said once."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, inner_step, mlp, sgd
from thinwire.hooks.distribute import DistributedOptimizer


def frozen(rank: int) -> nn.Module:
    model = mlp(rank)
    model.get_submodule("0").requires_grad_(False)
    return model


@pytest.mark.parametrize(("design", "optimizer"), [("update", adamw), ("3lc", sgd)])
def test_unfreezing_later_warns_once(design: str, optimizer: object) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inner_step(model, opt, rank, 0)
            assert not caught
            model.get_submodule("0").requires_grad_(True)
            for step in range(1, 4):
                inner_step(model, opt, rank, step)
        return [str(each.message) for each in caught]

    [[told]], _ = run_cluster(frozen, train, workers=1, optimizer=optimizer, design=design)  # type: ignore[arg-type]
    assert "1 parameters were frozen when the model was given to tw.distribute" in told and "(0.weight)" in told
