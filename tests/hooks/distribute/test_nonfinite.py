"""NaN and Inf with `tw.distribute`: skipped steps, a GradScaler's overflows, and optimizer states that hold them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import batch, mlp, sgd, values
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.moments import forget_what_is_not_finite

Train = Callable[[int, nn.Module, DistributedOptimizer], Any]
SKIPS = tw.codec("3lc", nonfinite="skip")


def layers(_rank: int) -> nn.Module:
    """A model without statistics, which a skipped step's forward pass would change."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))


def watched(poisoned: set[tuple[int, int]]) -> Train:
    """A training in which some (rank, step) see a NaN; it returns weights and residuals after each step."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[dict[str, torch.Tensor]]:
        seen = []
        for step in range(6):
            x, y = batch(rank, step)
            if (rank, step) in poisoned:
                x[0, 0] = torch.nan
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.sync()
            contexts = opt.state_dict()["contexts"]
            seen.append(
                {name: p.detach().clone() for name, p in model.named_parameters()}
                | {f"residual {name}": state["residual"] for name, state in contexts.items() if "residual" in state}
            )
        return seen

    return train


def test_nan_on_one_worker_skips_the_step_on_all_and_leaves_residuals_as_they_were() -> None:
    cases: list[dict[str, Any]] = [
        {"codec": SKIPS, "consistency": "bsp"},
        {"codec": SKIPS, "consistency": "backup[0]"},
        {"design": "terngrad[nonfinite=skip]"},
    ]
    for options in cases:
        results, core = run_cluster(layers, watched({(1, 3)}), workers=3, **options)
        for seen in results:
            for name, value in seen[3].items():
                assert torch.equal(value, seen[2][name]), name
            assert not torch.equal(seen[4]["0.weight"], seen[3]["0.weight"]), "the training goes on"
            assert all(bool(value.isfinite().all()) for value in seen[5].values())
        for name in ("0.weight", "2.weight"):
            assert torch.equal(results[0][5][name], results[1][5][name])
        assert core.finished


def test_skip_changes_no_bit_of_a_training_without_nan() -> None:
    plain, skips = (run_cluster(layers, watched(set()), codec=codec)[0] for codec in ("3lc", SKIPS))
    assert all(torch.equal(plain[0][5][name], skips[0][5][name]) for name in plain[0][5])


@pytest.mark.parametrize("policy", ["local[4]", "ssp[staleness=3,mode=passive]"])
@pytest.mark.parametrize(("step", "lost"), [(1, 0.5), (3, 1.0)])
def test_window_of_gradients_loses_the_step_with_nan_alone(policy: str, step: int, lost: float) -> None:
    """Every gradient is −1: the weights count them. In the middle of a window one worker's is left out of the sum."""

    def count(rank: int, model: nn.Module, opt: DistributedOptimizer) -> float:
        for number in range(8):
            opt.zero_grad()
            loss = -model(torch.ones(1, 40)).sum() * (torch.nan if (rank, number) == (1, step) else 1)
            loss.backward()
            opt.step()
        opt.flush()
        opt.sync()
        return float(model.get_parameter("weight").detach().mean())

    def zeros(rank: int) -> nn.Linear:
        layer = nn.Linear(40, 40, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    def one(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    assert run_cluster(zeros, count, optimizer=one, codec=SKIPS, consistency=policy)[0] == [8.0 - lost] * 2


def scaled(scales: bool, clips: bool, overflow_at: int = -1) -> Train:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scales)
        for step in range(5):
            x, y = batch(rank, step)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) * (torch.inf if (rank, step) == (1, overflow_at) else 1)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if clips:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
        opt.sync()
        return values(model)[:-80]  # but a batch norm's statistics

    return train


def test_grad_scaler_changes_no_bit_where_gradients_leave_unscaled() -> None:
    for clips in (False, True):
        plain, ours = (
            run_cluster(mlp, scaled(scales, clips), optimizer=sgd, design="3lc", overlap=False)[0]
            for scales in (False, True)
        )
        assert torch.equal(plain[0], ours[0]) and torch.equal(*ours)


def test_gradients_that_leave_scaled_are_refused() -> None:
    with pytest.raises((ConfigError, ProtocolError), match=r"nonfinite='skip'.*overlap=False"):
        run_cluster(mlp, scaled(True, False), optimizer=sgd, design="3lc")


def test_scaler_s_overflow_is_skipped_by_all_workers_or_refused() -> None:
    found, _ = run_cluster(mlp, scaled(True, False, 2), optimizer=sgd, design="3lc[nonfinite=skip]")
    assert torch.isfinite(found[0]).all() and torch.equal(*found)
    # A worker that hears of it from the other, through the server, may be first.
    with pytest.raises((NonFiniteError, ProtocolError), match="hold NaN or Inf"):
        run_cluster(mlp, scaled(True, False, 2), optimizer=sgd, design="3lc", overlap=False)


def test_overflow_before_the_first_step_says_what_helps() -> None:
    """A scaler's first scale is often too large, and gradients leave before step() could say it."""
    for design in ("3lc", "fp32"):

        def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
            (model(batch(rank, 0)[0]).sum() * torch.inf).backward()

        with pytest.raises(NonFiniteError, match=r"GradScaler.*nonfinite='skip'"):
            run_cluster(mlp, train, workers=1, optimizer=sgd, design=design)


class Recent(torch.optim.SGD):
    """Steps by the mean of the last three gradients, which it keeps in a list within a dict."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                past = self.state[parameter].setdefault("past", {"gradients": []})["gradients"]
                past.append(parameter.grad.clone())
                del past[:-3]
                parameter.grad = torch.stack(past).mean(0)
        return super().step()


class Bowl(nn.Module):
    """An overshooting step turns its gradient round, so that LBFGS takes an infinite one for curvature."""

    def __init__(self, _rank: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(4))

    def forward(self) -> torch.Tensor:
        return (self.place - torch.arange(1.0, 5.0)).square().sum()


@pytest.mark.filterwarnings("ignore:worker 1. '.*' holds NaN or Inf after inner step")
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["list of gradients", "LBFGS"])
def test_optimizer_state_forgets_nan_after_a_void_round(kind: str, poison: float) -> None:
    lbfgs = kind == "LBFGS"

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, float]:
        for step in range(20):

            def closure(step: int = step) -> torch.Tensor:
                opt.zero_grad()
                x, y = batch(rank, step)
                loss = model() if lbfgs else nn.functional.cross_entropy(model(x), y)
                (loss * (poison if (rank, step) == (1, 6) else 1)).backward()
                return loss

            opt.step(closure)
        opt.flush()
        return values(model), opt.traffic()["void_rounds"] if rank else 1.0

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if lbfgs:
            return torch.optim.LBFGS(model.parameters(), lr=1.6, max_iter=1)
        return Recent(model.parameters(), lr=0.01)

    design = "update[codec=fp32,small=fp32]" if lbfgs else "update"
    found, _ = run_cluster(Bowl if lbfgs else mlp, train, optimizer=optimizer, design=design)
    assert [void for _, void in found] == [1, 1]
    assert torch.isfinite(found[0][0]).all() and torch.equal(found[0][0], found[1][0])
    if lbfgs:
        torch.testing.assert_close(found[0][0], torch.arange(1.0, 5.0), atol=0.1, rtol=0)


def test_forgetting_keeps_what_is_finite_and_of_another_shape() -> None:
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
