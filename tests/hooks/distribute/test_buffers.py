"""Buffers with `tw.distribute`: statistics travel; masks, tables and other constants stay each worker's own."""

from __future__ import annotations

import copy
import warnings
from typing import Any

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
    """Has the mask and the table of positions of transformers, and a batch norm's statistics."""

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


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("design", ["local-sgd[h=2]", "3lc"])
def test_statistics_travel_and_masks_and_tables_stay(design: str) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, ...]:
        for step in range(4):
            inner_step(model, opt, rank, step)
        opt.flush()
        buffers = (model.get_buffer(name) for name in ("mask", "positions", "norm.running_mean"))
        return tuple(each.clone() for each in (weights(model), *buffers))

    local = design != "3lc"
    first, second = run_cluster(Attends, train, optimizer=adamw if local else sgd, design=design)[0]
    assert torch.equal(first[0], second[0]) and not torch.equal(first[0], weights(Attends(0)))
    assert torch.equal(first[1], Attends(0).mask)
    for rank, own in enumerate((first, second)):
        assert torch.equal(own[2], Attends(rank).positions), "each keeps its own"
    # With gradients, worker 0's statistics go to the others from time to time alone.
    assert first[3].any() and (torch.equal(first[3], second[3]) or not local)


def test_plan_has_statistics_alone_and_refuses_damaged_ones_by_name() -> None:
    model = Attends(0)
    planned = make_plan(model, adamw(model), find_design("update"), workers=2)
    buffers = {each.name for each in planned.tensors} - {name for name, _ in model.named_parameters()}
    assert buffers == {"norm.running_mean", "norm.running_var"}
    model.get_buffer("norm.running_var")[3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"norm\.running_var: holds NaN"):
        run_cluster(lambda rank: model, lambda rank, model, opt: None, workers=1, optimizer=adamw, design="update")


class Averages(nn.Module):
    """Assigns its buffer anew in every forward pass, or writes into it; and keeps the least it has seen."""

    def __init__(self, assigns: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.assigns = nn.Linear(12, 3), assigns
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("least", torch.full((12,), torch.inf))
        self.mean: torch.Tensor
        self.least: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.assigns:
            self.mean = mean
        else:
            self.mean.copy_(mean)
        self.least.copy_(torch.minimum(self.least, x.detach().amin(0)))
        out: torch.Tensor = self.layer(x - self.mean)
        return out


def test_buffers_assigned_anew_travel_as_those_written_into() -> None:
    for design in ("update", "fp32"):

        def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
            for step in range(4):
                inner_step(model, opt, rank, step)
            opt.flush()
            with opt.shared_weights():
                return model.get_buffer("mean").clone()

        assigned, written = (
            run_cluster(lambda rank, on=on: Averages(on), train, design=design, state_interval=1)[0]  # type: ignore[misc]
            for on in (True, False)
        )
        assert torch.equal(assigned[0], written[0]) and torch.equal(*assigned)


def test_buffer_of_another_dtype_is_taken_and_one_that_grows_stays_with_one_warning() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for mean in (torch.ones(12, dtype=torch.bfloat16), torch.ones(12).expand(12)):
            model(torch.ones(8, 12)).sum().backward()
            model.mean = mean
            opt.step()
            opt.sync()
            assert model.get_buffer("mean").dtype == torch.float32
        model.get_buffer("mean").data = torch.full((12,), 2.0)
        inner_step(model, opt, rank, 1)
        for step in range(2):
            model.mean = torch.zeros(5 + step)
            with warnings.catch_warnings() if step else pytest.warns(UserWarning, match="'mean' was assigned a value"):
                opt.step()

    run_cluster(lambda rank: Averages(), train, design="update", workers=1)


def test_buffer_that_began_with_inf_stays_when_a_training_goes_on() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        inner_step(model, opt, rank, 0)
        opt.sync()
        assert model.get_buffer("least").isfinite().all()
        return copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})

    def again(rank: int) -> nn.Module:
        model = Averages()
        model.load_state_dict(saved["model"])
        return model

    [saved], core = run_cluster(lambda rank: Averages(), train, workers=1, design="update")
    assert saved["opt"]["buffers"] == ["mean"]
    fresh = type(core)()
    fresh.load_state_dict(core.state_dict())
    resumed, _ = run_cluster(
        again, lambda rank, model, opt: opt.steps_done, workers=1, design="update", core=fresh, resume=saved["opt"]
    )
    assert resumed == [1]
