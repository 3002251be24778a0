"""Where a plan has a model's values: as training places them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from thinwire import plan
from thinwire.errors import ConfigError
from thinwire.hooks.planning import make_plan
from thinwire.planner.places import largest_share, on_servers
from thinwire.planner.profile import Profile, TensorSeconds, profile
from thinwire.planner.step_time import TensorCosts
from thinwire.policies.designs import design


class Backwards(nn.Module):
    """Its last layer is called first, and all but one are equally large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)])
        self.head = nn.Linear(40, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def test_plan_places_tensors_on_servers_as_training_does() -> None:
    model = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(4, 40)).sum().backward()
        optimizer.step()

    measured = profile(model, step, steps=2)
    assert next(each.name for each in measured.tensors) == "layers.2.weight"
    for name in ("3lc", "update", "demo"):
        made = design(name)
        for servers in (2, 3, 5):
            placed = make_plan(model, torch.optim.SGD(model.parameters()), made, workers=2, shards=servers).assignment
            there = dict(zip((table.name for table in placed.tables), placed.partitions, strict=True))
            assert on_servers(measured, made, servers) == there, (name, servers)


def of_sizes(*sizes: int) -> Profile:
    tensors = tuple(
        TensorSeconds(name=f"{number}.weight", shape=(size // 10, 10), forward_s=1e-3, backward_s=2e-3, number=number)
        for number, size in enumerate(sizes)
    )
    return Profile(tensors=tensors, step_s=0.003 * len(sizes), gradients=())


def test_plan_refuses_idle_servers_before_it_measures() -> None:
    setting = plan.Setting(servers=3)
    with pytest.raises(ConfigError, match=r"1 of 3 servers would hold no parameters, as 'heuristic' places this model"):
        plan.Plan(of_sizes(4000, 5000), ["3lc"], setting)
    assert plan.Plan(of_sizes(4000, 5000, 100), ["3lc"], setting).setting is setting


def costs_of(measured: Profile, bits: float) -> dict[str, TensorCosts]:
    nbytes = {each.name: math.prod(each.shape) * bits / 8 for each in measured.tensors}
    return {name: TensorCosts(push_nbytes=each, pull_nbytes=each) for name, each in nbytes.items()}


def test_largest_share_is_an_equal_one_except_where_matrices_stay_whole() -> None:
    measured = of_sizes(12_000, 2000, 2000, 2000, 2000)
    for name, share in (("3lc", 6 / 20), ("update", 6 / 20), ("demo", 12 / 20)):
        found = largest_share(measured, design(name), costs_of(measured, 32), 4)
        assert found == pytest.approx(share, rel=0.01), name
