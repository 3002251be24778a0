"""What scripts do around a distributed optimizer that it has to see: refused before anything changes, or done right."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, resume, sgd, values
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.planning import make_plan
from thinwire.policies.designs import design as find_design
from thinwire.schema import FROZEN
from thinwire.server.agreement import difference


def backward(model: nn.Module, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("design", ["fp32", "update"])
def test_a_parameter_that_the_model_lacks_is_refused(design: str) -> None:
    model, scale = mlp(0), nn.Parameter(torch.ones(3))
    held = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    with pytest.raises(ConfigError, match=r"group 0 holds a parameter of shape \(3,\) that the model does not have"):
        make_plan(model, held, find_design(design), workers=2)
    scale.requires_grad_(False)
    make_plan(model, held, find_design(design), workers=2)


def test_parameters_without_values_or_in_shards_are_named() -> None:
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="'weight' is on the meta device"):
        make_plan(empty, sgd(empty), find_design("update"), workers=2)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("design", ["3lc", "update"])
def test_lazy_modules_are_named_until_a_forward_pass_has_given_them_shapes(design: str) -> None:
    layers: dict[str, nn.Module] = {
        "parameter '1.weight'": nn.LazyLinear(3),
        "buffer '1.running_mean'": nn.LazyBatchNorm1d(affine=False),
    }
    for named, lazy in layers.items():
        model = nn.Sequential(nn.Linear(12, 4), lazy)
        with pytest.raises(ConfigError, match=f"{named} of a lazy module has no shape yet: run one forward pass"):
            make_plan(model, sgd(model), find_design(design), workers=2)
        model(batch(0, 0)[0])
        make_plan(model, sgd(model), find_design(design), workers=2)


def test_a_state_that_servers_would_lose_is_refused() -> None:
    model = mlp(0)
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model, 0, 0)
    used.step()
    with pytest.raises(ConfigError, match=r"the optimizer has a state \(momentum_buffer\), and .*servers run the"):
        make_plan(model, used, find_design("3lc"), workers=2)
    make_plan(model, used, find_design("update"), workers=2)
    make_plan(model, torch.optim.Adagrad(model.parameters()), find_design("3lc"), workers=2)  # whose state begins full


class Frozen(nn.Module):
    """What is trained follows layers with the values of a seed; of those, one follows what is trained, as a teacher."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.teacher = (nn.Linear(12, 12).requires_grad_(False) for _ in range(2))
        self.last = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.teacher(self.first(x)))
        return found


@pytest.mark.parametrize("design", ["3lc", "update"])
def test_frozen_parameters_are_the_same_on_all_workers_when_a_training_begins(design: str) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(2):
            inner_step(model, opt, rank, step)
        opt.flush()
        return values(model)

    found, _ = run_cluster(lambda rank: Frozen(0), train, optimizer=sgd, design=design, overlap=False)
    assert torch.equal(*found)
    with pytest.raises(
        ProtocolError, match=r"digest of frozen parameters: this worker has .* They are not sent: before"
    ):
        # The other worker waits so long.
        run_cluster(Frozen, train, optimizer=sgd, design=design, overlap=False, timeout_s=2)
    own = {FROZEN: "own"}
    found, _ = run_cluster(Frozen, train, optimizer=sgd, design=design, overlap=False, settings=own)
    assert not torch.equal(*found)


def test_frozen_parameters_may_have_changed_where_a_training_goes_on() -> None:
    model = Frozen(0)
    plan = make_plan(model, sgd(model), find_design("3lc"), workers=2).plans[0]
    with torch.no_grad():
        model.teacher.weight.mul_(0.9)
    later = make_plan(model, sgd(model), find_design("3lc"), workers=2).plans[0]
    assert difference(plan, later) is not None
    assert difference(plan, later, begun=True) is None
    resumed = make_plan(model, sgd(model), find_design("3lc"), workers=2, begins=False).plans[0]
    assert difference(plan, resumed) is None


def test_a_training_whose_frozen_parameters_have_moved_goes_on_from_its_first_round() -> None:
    """The shard is at exchange 0, and its plan holds what was frozen at the beginning."""

    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        for step in range(2):
            inner_step(model, opt, rank, step)
        opt.sync()
        model.teacher.weight.data.mul_(0.9)  # type: ignore[operator, union-attr]
        return copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})

    design = "local-sgd[h=4]"
    saved, core = run_cluster(lambda rank: Frozen(0), first, optimizer=sgd, design=design)
    assert core.step == 0
    found = resume(saved, core, design, range(2, 8), lambda rank: Frozen(0), optimizer=sgd)
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_frozen_parameters_that_are_not_compared() -> None:
    """Of a class of its own, as of quantised values, sparse and nested ones, those without values, and shared ones."""

    class Packed(nn.Parameter):
        pass

    model = nn.Linear(12, 3)
    plain = make_plan(model, sgd(model), find_design("3lc"), workers=2).plans[0]
    assert FROZEN not in plain.settings
    model.packed = Packed(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.some = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    model.none = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
    model.many = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), requires_grad=False)
    model.same = nn.Parameter(model.weight.data, requires_grad=False)
    assert make_plan(model, sgd(model), find_design("3lc"), workers=2).plans[0] == plain


@pytest.mark.parametrize("option", ["lr", "momentum"])
def test_a_rate_that_changes_after_gradients_have_left(option: str) -> None:
    """With overlap=False they leave at step(); otherwise it is refused, and the step can be ended as it is."""

    def train(overlap: bool) -> Any:
        def work(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
            for step in range(3):
                opt.zero_grad()
                backward(model, rank, step)
                opt.param_groups[0][option] = 0.1 * (step + 1)
                if overlap and rank == 0:  # whose rates count
                    with pytest.raises(ConfigError, match=r"between backward\(\) and step\(\).*Another step\(\) ends"):
                        opt.step()
                opt.step()
            opt.sync()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        return run_cluster(mlp, work, optimizer=sgd, codec="fp32", overlap=overlap)[0]

    assert torch.equal(*train(False)) and torch.equal(*train(True))


def test_a_second_backward_pass_changes_no_residual() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> bool:
        def residuals() -> list[torch.Tensor]:
            return [each["residual"] for each in opt.state_dict()["contexts"].values() if "residual" in each]

        backward(model, rank, 0)
        before = residuals()
        with pytest.raises(ProtocolError, match="pushed twice"):
            backward(model, rank, 1)
        same = all(torch.equal(old, new) for old, new in zip(before, residuals(), strict=True))
        with pytest.raises(ConfigError, match="changed after they had left"):
            opt.step()
        opt.step()
        return same and len(before) > 0

    assert run_cluster(lambda rank: nn.Linear(12, 30, bias=False), train, workers=1, codec="3lc")[0] == [True]


def test_no_sync_inside_no_sync() -> None:
    """The one outside still gathers after the one inside has ended: the step is of all three passes."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[torch.Tensor]:
        with opt.no_sync():
            with opt.no_sync():
                backward(model, rank, 0)
            backward(model, rank, 1)
        backward(model, rank, 2)
        opt.step()
        opt.sync()
        return [each.detach().clone() for each in model.parameters()]

    found, _ = run_cluster(mlp, train, codec="fp32")
    alone = [mlp(rank) for rank in range(2)]
    for rank, model in enumerate(alone):
        for step in range(3):
            backward(model, rank, step)
    taken = zip(*(model.parameters() for model in alone), strict=True)
    wanted = [one.detach() - 0.1 * (one.grad + other.grad) / 2 for one, other in taken]
    for each in found:
        torch.testing.assert_close(each, wanted)


def test_steps_that_cannot_count_change_nothing() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        inner_step(model, opt, rank, 0)
        backward(model, rank, 1)
        with opt.shared_weights():
            before = values(model)
            with pytest.raises(ProtocolError, match="take steps outside the block"):
                opt.step()
            assert torch.equal(before, values(model)) and opt.steps_done == 1
        opt.flush()
        opt.close()
        before = values(model)
        with pytest.raises(ProtocolError, match=r"close\(\) was called"):
            opt.step()
        assert torch.equal(before, values(model))

    run_cluster(mlp, train, optimizer=adamw, design="local-sgd[h=2]", workers=1)


@pytest.mark.parametrize(
    "design",
    ["streaming-diloco[h=4,fragments=2,delay=1]", "local-sgd[h=1,keep=0.5,steer=0]", "local-sgd[h=2]", "terngrad"],
)
def test_evaluation_in_inference_mode(design: str) -> None:
    """The forward pass that first takes an update may be one of an evaluation."""

    def train(inference: bool) -> Any:
        def work(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
            for step in range(6):
                opt.zero_grad()
                backward(model, rank, step)
                opt.step()
                with torch.inference_mode(inference), torch.no_grad():
                    model(batch(rank, step)[0])
            opt.flush()
            return values(model)

        return run_cluster(mlp, work, optimizer=sgd if design == "terngrad" else adamw, design=design)[0]

    assert torch.equal(train(True)[0], train(False)[0])


class Averages(nn.Module):
    """Assigns its buffer anew in every forward pass, or writes into it; and keeps the least it has seen."""

    def __init__(self, rank: int, *, assigns: bool) -> None:
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


@pytest.mark.parametrize("design", ["update", "fp32"])
def test_buffers_that_are_assigned_anew_travel(design: str) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(4):
            opt.zero_grad()
            backward(model, rank, step)
            opt.step()
        opt.flush()
        with opt.shared_weights():
            return model.get_buffer("mean").clone()

    def final(assigns: bool) -> Any:
        return run_cluster(lambda rank: Averages(rank, assigns=assigns), train, design=design, state_interval=1)[0]

    assigned, written = final(True), final(False)
    assert torch.equal(assigned[0], written[0]) and torch.equal(*assigned)


def test_a_buffer_that_grows_stays_at_home_and_another_dtype_is_taken() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for mean in (torch.ones(12, dtype=torch.bfloat16), torch.ones(12).expand(12)):
            backward(model, rank, 0)
            model.mean = mean
            opt.step()
            opt.sync()
            assert model.get_buffer("mean").dtype == torch.float32
        model.get_buffer("mean").data = torch.full((12,), 2.0)
        backward(model, rank, 1)
        opt.step()
        backward(model, rank, 2)
        for step in range(2):
            model.mean = torch.zeros(5 + step)
            with warnings.catch_warnings() if step else pytest.warns(UserWarning, match="'mean' was assigned a value"):
                opt.step()

    run_cluster(lambda rank: Averages(rank, assigns=False), train, design="update", workers=1)


def test_moments_of_zero_are_no_state() -> None:
    """What torch.distributed.checkpoint makes of an optimizer to load into it."""
    model = mlp(0)
    fresh = torch.optim.Adam(model.parameters())
    get_optimizer_state_dict(model, fresh)
    make_plan(model, fresh, find_design("3lc"), workers=2)


def test_a_buffer_that_began_with_inf_stays_at_home_when_it_goes_on() -> None:
    saved: dict[str, Any] = {}

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        backward(model, rank, 0)
        opt.step()
        opt.sync()
        assert model.get_buffer("least").isfinite().all()
        saved["optimizer"], saved["model"] = opt.state_dict(), copy.deepcopy(model.state_dict())

    def again(rank: int) -> nn.Module:
        model = Averages(rank, assigns=False)
        model.load_state_dict(saved["model"])
        return model

    def go_on(rank: int, model: nn.Module, opt: DistributedOptimizer) -> int:
        return opt.steps_done

    _, core = run_cluster(lambda rank: Averages(rank, assigns=False), train, workers=1, design="update")
    assert saved["optimizer"]["buffers"] == ["mean"]
    fresh = type(core)()
    fresh.load_state_dict(core.state_dict())
    resumed, _ = run_cluster(again, go_on, workers=1, design="update", core=fresh, resume=saved["optimizer"])
    assert resumed == [1]


def test_a_copy_of_the_optimizer_is_refused() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for copies in (copy.deepcopy, pickle.dumps):
            with pytest.raises(tw.ConfigError, match="cannot be copied or pickled"):
                copies(opt)

    run_cluster(mlp, train, workers=1, codec="fp32")
