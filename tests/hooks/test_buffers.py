"""Which buffers of a model travel: statistics do, and constants that every process makes for itself do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, inner_step, sgd
from thinwire.errors import NonFiniteError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.planning import make_plan
from thinwire.policies.designs import design as find_design


class Attends(nn.Module):
    """Has what transformers have: a mask, a table of positions, and besides a batch norm's statistics."""

    mask: torch.Tensor
    positions: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Linear(40, 3)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("positions", torch.linspace(0, 1, 40) + rank, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.softmax(self.mask, 1) @ self.norm(self.first(x))
        answer: torch.Tensor = self.last(torch.relu(mixed + self.positions.frac()))
        return answer


@pytest.mark.parametrize("design", ["local-sgd[h=2]", "3lc"])
def test_masks_and_tables_stay_at_home_and_statistics_travel(design: str) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, ...]:
        for step in range(4):
            inner_step(model, opt, rank, step)
        opt.flush()
        assert isinstance(model, Attends) and isinstance(model.norm.running_mean, torch.Tensor)
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        return tuple(each.clone() for each in (weights, model.mask, model.positions, model.norm.running_mean))

    local = design != "3lc"
    first, second = run_cluster(Attends, train, optimizer=adamw if local else sgd, design=design)[0]
    assert torch.equal(first[0], second[0]) and not torch.equal(first[0], _weights(Attends(0)))
    assert torch.equal(first[1], Attends(0).mask)
    for rank, own in enumerate((first, second)):
        assert torch.equal(own[2], Attends(rank).positions), "each keeps its own"
    # With gradients, worker 0's statistics go to the others from time to time alone.
    assert first[3].any() and (torch.equal(first[3], second[3]) or not local)


def test_only_statistics_are_planned() -> None:
    model = Attends(0)
    planned = make_plan(model, adamw(model), find_design("update"), workers=2)
    assert {each.name for each in planned.tensors} - {name for name, _ in model.named_parameters()} == {
        "norm.running_mean",
        "norm.running_var",
    }


def test_damaged_statistics_are_refused_by_name() -> None:
    def damaged(rank: int) -> nn.Module:
        model = Attends(rank)
        assert isinstance(model.norm.running_var, torch.Tensor)
        model.norm.running_var[3] = torch.nan
        return model

    with pytest.raises(NonFiniteError, match=r"norm\.running_var: holds NaN"):
        run_cluster(damaged, lambda rank, model, opt: None, workers=1, optimizer=adamw, design="update")


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()
