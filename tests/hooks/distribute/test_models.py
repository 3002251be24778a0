"""Models with `tw.distribute`: buffers, frozen parameters, and refused tensors, which errors name."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, resume, sgd, steps
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.planning import make_plan
from thinwire.policies.designs import design as find_design
from thinwire.schema import FROZEN


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
def test_buffers_statistics_are_exchanged_and_masks_stay(design: str) -> None:
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


def test_plan_includes_only_statistics_and_refuses_damaged_ones() -> None:
    model = Attends(0)
    planned = make_plan(model, adamw(model), find_design("update"), workers=2)
    buffers = {each.name for each in planned.tensors} - {name for name, _ in model.named_parameters()}
    assert buffers == {"norm.running_mean", "norm.running_var"}
    model.get_buffer("norm.running_var")[3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"norm\.running_var: holds NaN"):
        run_cluster(lambda rank: model, lambda rank, model, opt: None, workers=1, optimizer=adamw, design="update")


class Observes(nn.Module):
    """Resizes buffers where they lie, as observers of quantisation do; `queue` holds data, not statistics."""

    def __init__(self, rank: int, at_step: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.at_step, self.calls = at_step, 0
        self.first, self.last = nn.Linear(12, 40), nn.Linear(40, 3)
        self.register_buffer("scale", torch.ones(7 if at_step else 0))
        self.register_buffer("queue", torch.full((5,), float(rank)))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["queue"])  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if self.calls >= self.at_step:
            with torch.no_grad():
                largest = hidden.amax(0)
                self.get_buffer("scale").resize_(largest.shape).copy_(largest)
        self.calls += 1
        answer: torch.Tensor = self.last(hidden)
        return answer


@pytest.mark.parametrize("design", ["3lc", "terngrad", "fp32", "local-sgd[h=2]"])
@pytest.mark.parametrize(
    ("at_step", "told"), [(0, "begin empty are not exchanged"), (3, r"it is \(40,\) now, and was")]
)
def test_resized_and_ignored_buffers_stay_local(design: str, at_step: int, told: str) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, ...]:
        for step in range(6):
            inner_step(model, opt, rank, step)
        opt.flush()
        return weights(model), model.get_buffer("scale").clone(), model.get_buffer("queue").clone()

    optimizer = adamw if design.startswith("local") else sgd
    with pytest.warns(UserWarning, match=told):
        found = run_cluster(
            lambda rank: Observes(rank, at_step), train, optimizer=optimizer, design=design, state_interval=1
        )[0]
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1]), "each has what its own batches gave"
    for rank, (_, scale, queue) in enumerate(found):
        assert scale.shape == (40,) and torch.equal(queue, torch.full((5,), float(rank)))


class Frozen(nn.Module):
    """A trained layer after two frozen ones with the values of a seed; the teacher may follow the trained layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.teacher = (nn.Linear(12, 12).requires_grad_(False) for _ in range(2))
        self.last = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.teacher(self.first(x)))
        return found


@pytest.mark.parametrize("design", ["3lc", "update"])
def test_different_frozen_parameters_raise_at_start(design: str) -> None:
    options: dict[str, Any] = {"optimizer": sgd, "design": design, "overlap": False}
    found, _ = run_cluster(lambda rank: Frozen(), steps(2), **options)
    assert torch.equal(*found)
    with pytest.raises(ProtocolError, match="digest of frozen parameters"):
        run_cluster(Frozen, steps(2), timeout=2, **options)  # the other worker waits so long
    found, _ = run_cluster(Frozen, steps(2), settings={FROZEN: "own"}, **options)
    assert not torch.equal(*found)


def test_changed_frozen_parameters_resume_in_first_round() -> None:
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


def plan(model: nn.Module, optimizer: torch.optim.Optimizer, design: str) -> object:
    return make_plan(model, optimizer, find_design(design), workers=2)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("design", ["3lc", "update"])
def test_foreign_meta_and_lazy_parameters_raise_config_error(design: str) -> None:
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


def test_optimizer_state_with_servers_raises_config_error() -> None:
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
def test_different_dtypes_on_workers_raise_protocol_error(design: str, name: str) -> None:
    def mixed(rank: int) -> nn.Module:
        model = mlp(rank)
        if rank == 1 and name == "0.weight":
            model = model.bfloat16()
        elif rank == 1:
            model.get_submodule("1").register_buffer("running_var", model.get_buffer(name).double())
        return model

    optimizer = sgd if design == "3lc" else adamw
    with pytest.raises(ProtocolError, match=f"'{name}' is (float|bfloat)"):  # the other worker waits so long
        run_cluster(mixed, steps(1), optimizer=optimizer, design=design, timeout=0.5)
