"""Frozen parameters with `tw.distribute`: compared when a training begins, not when it goes on, and never sent."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, inner_step, mlp, resume, sgd, steps
from thinwire.errors import ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.planning import make_plan
from thinwire.policies.designs import design as find_design
from thinwire.schema import FROZEN, Plan
from thinwire.server.agreement import difference


class Frozen(nn.Module):
    """A trained layer behind two frozen ones with the values of a seed; the teacher may follow what is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.teacher = (nn.Linear(12, 12).requires_grad_(False) for _ in range(2))
        self.last = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.teacher(self.first(x)))
        return found


def plan_of(model: nn.Module, **options: Any) -> Plan:
    return make_plan(model, sgd(model), find_design("3lc"), workers=2, **options).plans[0]


@pytest.mark.parametrize("design", ["3lc", "update"])
def test_frozen_parameters_must_be_equal_on_all_workers_when_a_training_begins(design: str) -> None:
    options: dict[str, Any] = {"optimizer": sgd, "design": design, "overlap": False}
    found, _ = run_cluster(lambda rank: Frozen(), steps(2), **options)
    assert torch.equal(*found)
    with pytest.raises(ProtocolError, match="digest of frozen parameters"):
        run_cluster(Frozen, steps(2), timeout_s=2, **options)  # the other worker waits so long
    found, _ = run_cluster(Frozen, steps(2), settings={FROZEN: "own"}, **options)
    assert not torch.equal(*found)


def test_frozen_parameters_may_have_changed_where_a_training_goes_on() -> None:
    model = Frozen()
    plan = plan_of(model)
    model.teacher.weight.data.mul_(0.9)
    later = plan_of(model)
    assert difference(plan, later) is not None
    assert difference(plan, later, begun=True) is None
    assert difference(plan, plan_of(model, begins=False)) is None


def test_training_with_changed_frozen_parameters_resumes_in_its_first_round() -> None:
    """The shard is at exchange 0, and its plan holds the digest of the beginning."""

    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        for step in range(2):
            inner_step(model, opt, rank, step)
        opt.sync()
        model.teacher.weight.data.mul_(0.9)  # type: ignore[operator, union-attr]
        return copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})

    design = "local-sgd[h=4]"
    saved, core = run_cluster(lambda rank: Frozen(), first, optimizer=sgd, design=design)
    assert core.step == 0
    found = resume(saved, core, design, range(2, 8), lambda rank: Frozen(), optimizer=sgd)
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_packed_sparse_meta_nested_and_shared_frozen_parameters_are_not_compared() -> None:
    class Packed(nn.Parameter):
        pass

    model = nn.Linear(12, 3)
    plain = plan_of(model)
    assert FROZEN not in plain.settings
    model.packed = Packed(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.some = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    model.none = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
    model.many = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), requires_grad=False)
    model.same = nn.Parameter(model.weight.data, requires_grad=False)
    assert plan_of(model) == plain


def test_unfreezing_later_warns_once() -> None:
    for design in ("update", "3lc"):

        def frozen(rank: int) -> nn.Module:
            model = mlp(rank)
            model.get_submodule("0").requires_grad_(False)
            return model

        def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                inner_step(model, opt, rank, 0)
                assert not caught
                model.get_submodule("0").requires_grad_(True)
                for step in range(1, 4):
                    inner_step(model, opt, rank, step)
            return [str(each.message) for each in caught]

        optimizer = sgd if design == "3lc" else adamw
        [[told]], _ = run_cluster(frozen, train, workers=1, optimizer=optimizer, design=design)
        assert "frozen" in told and "(0.weight)" in told
