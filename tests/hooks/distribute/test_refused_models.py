"""Models and optimizers that `tw.distribute` refuses before anything is trained, by the tensor's name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, sgd, steps
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.planning import make_plan
from thinwire.policies.designs import design as find_design


def plan(model: nn.Module, optimizer: torch.optim.Optimizer, design: str) -> object:
    return make_plan(model, optimizer, find_design(design), workers=2)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("design", ["3lc", "update"])
def test_foreign_meta_and_lazy_parameters_are_refused_by_name(design: str) -> None:
    model, scale = mlp(0), nn.Parameter(torch.ones(3))
    held = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    with pytest.raises(ConfigError, match=r"group 0 holds a parameter of shape \(3,\)"):
        plan(model, held, design)
    plan(model, torch.optim.SGD([*model.parameters(), scale.requires_grad_(False)], lr=0.1), design)
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="'weight' is on the meta device"):
        plan(empty, sgd(empty), design)
    lazies: dict[str, Any] = {
        "parameter '1.weight'": nn.LazyLinear(3),
        "buffer '1.running_mean'": nn.LazyBatchNorm1d(affine=False),
    }
    for named, lazy in lazies.items():
        model = nn.Sequential(nn.Linear(12, 4), lazy)
        with pytest.raises(ConfigError, match=f"{named} of a lazy module"):
            plan(model, sgd(model), design)
        model(batch(0, 0)[0])
        plan(model, sgd(model), design)


def test_optimizer_state_that_servers_would_lose_is_refused() -> None:
    model = mlp(0)
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inner_step(model, used, 0, 0)
    with pytest.raises(ConfigError, match="momentum_buffer"):
        plan(model, used, "3lc")
    plan(model, used, "update")
    plan(model, torch.optim.Adagrad(model.parameters()), "3lc")  # whose state begins full
    zeros = torch.optim.Adam(model.parameters())
    get_optimizer_state_dict(model, zeros)  # torch.distributed.checkpoint makes moments of zero to load into
    plan(model, zeros, "3lc")


@pytest.mark.parametrize(
    ("design", "name"), [("3lc", "0.weight"), ("local-sgd[h=2]", "0.weight"), ("update", "1.running_var")]
)
def test_models_of_two_dtypes_are_refused_by_name(design: str, name: str) -> None:
    def mixed(rank: int) -> nn.Module:
        model = mlp(rank)
        if rank == 1 and name == "0.weight":
            model = model.bfloat16()
        elif rank == 1:
            model.get_submodule("1").register_buffer("running_var", model.get_buffer(name).double())
        return model

    optimizer = sgd if design == "3lc" else adamw
    with pytest.raises(ProtocolError, match=f"'{name}' is (float|bfloat)"):  # the other worker waits so long
        run_cluster(mixed, steps(1), optimizer=optimizer, design=design, timeout_s=0.5)


def test_copy_or_pickle_of_the_optimizer_is_refused() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for copies in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ConfigError, match="cannot be copied or pickled"):
                copies(opt)

    run_cluster(mlp, train, workers=1, codec="fp32")
