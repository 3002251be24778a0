"""An optimizer that keeps its past in lists trains on after a round that went without its worker."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import batch, mlp, values
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.moments import forget_what_is_not_finite

VOID = pytest.mark.filterwarnings("ignore:worker 1. '.*' holds NaN or Inf after inner step")


class Recent(torch.optim.SGD):
    """Steps by the mean of the last three gradients, which it keeps in a list within a dict."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                past = self.state[parameter].setdefault("past", {"gradients": []})["gradients"]
                past.append(parameter.grad.clone())
                del past[:-3]
                parameter.grad = torch.stack(past).mean(0)
        return super().step()


@VOID
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_gradients_in_a_nested_list(poison: float) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, float]:
        for step in range(12):
            x, y = batch(rank, step)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (loss * (poison if (rank, step) == (1, 4) else 1)).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.flush()
        return values(model), opt.traffic()["void_rounds"] if rank else 1.0

    def recent(model: nn.Module) -> torch.optim.Optimizer:
        return Recent(model.parameters(), lr=0.01)

    found, _ = run_cluster(mlp, train, optimizer=recent, design="update")
    assert torch.isfinite(found[0][0]).all() and torch.equal(found[0][0], found[1][0])
    assert [void for _, void in found] == [1, 1]


class Bowl(nn.Module):
    """Whose gradient an overshooting step turns round, so that LBFGS takes an infinite one for curvature."""

    def __init__(self, _rank: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(4))

    def forward(self) -> torch.Tensor:
        return (self.place - torch.arange(1.0, 5.0)).square().sum()


@VOID
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_lbfgs_begins_anew(poison: float) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[float, float]:
        for step in range(20):

            def closure(step: int = step) -> torch.Tensor:
                opt.zero_grad()
                loss: torch.Tensor = model()
                (loss * (poison if (rank, step) == (1, 6) else 1)).backward()  # type: ignore[no-untyped-call]
                return loss

            opt.step(closure)
        opt.flush()
        return float(model().detach()), opt.traffic()["void_rounds"] if rank else 1.0

    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=1.6, max_iter=1)

    found, _ = run_cluster(Bowl, train, optimizer=lbfgs, design="update[codec=fp32,small=fp32]")
    assert all(void == 1 and loss < 0.01 for loss, void in found), found


def test_what_is_finite_and_of_another_shape_stays() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    whole, half, alone = torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([3, 4, torch.inf]).half(), torch.ones(2)
    steps = torch.tensor([7, 8, 9])
    optimizer.state[parameter] = {
        "step": 3,
        "name": "nan",
        "past": [whole, ({"deep": deque([half, None, alone])},), steps],
    }
    forget_what_is_not_finite(optimizer)
    assert (whole.tolist(), half.tolist(), alone.tolist()) == ([1, 0, 0], [3, 0, 0], [1, 1])
    assert steps.tolist() == [7, 8, 9] and optimizer.state[parameter]["step"] == 3
