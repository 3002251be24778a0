"""NaN and Inf with `tw.distribute`: skipped steps and rounds, a GradScaler's overflows, and moments that hold them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import Optimizers, adamw, batch, inner_optimizer, mlp, sgd, values, wide
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


def test_nan_on_one_worker_skips_step_on_all_and_keeps_residuals() -> None:
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
            assert not torch.equal(seen[4]["0.weight"], seen[3]["0.weight"]), "training continues"
            assert all(bool(value.isfinite().all()) for value in seen[5].values())
        for name in ("0.weight", "2.weight"):
            assert torch.equal(results[0][5][name], results[1][5][name])
        assert core.finished


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


def test_grad_scaler_with_unscaled_pushes_changes_no_bit() -> None:
    for clips in (False, True):
        plain, ours = (
            run_cluster(mlp, scaled(scales, clips), optimizer=sgd, design="3lc", overlap=False)[0]
            for scales in (False, True)
        )
        assert torch.equal(plain[0], ours[0]) and torch.equal(*ours)


def test_scaled_pushes_raise_config_error() -> None:
    with pytest.raises((ConfigError, ProtocolError), match=r"nonfinite='skip'.*overlap=False"):
        run_cluster(mlp, scaled(True, False), optimizer=sgd, design="3lc")


def test_grad_scaler_overflow_skips_on_all_workers_or_raises() -> None:
    found, _ = run_cluster(mlp, scaled(True, False, 2), optimizer=sgd, design="3lc[nonfinite=skip]")
    assert torch.isfinite(found[0]).all() and torch.equal(*found)
    # A worker that hears of it from the other, through the server, may be first.
    with pytest.raises((NonFiniteError, ProtocolError), match="hold NaN or Inf"):
        run_cluster(mlp, scaled(True, False, 2), optimizer=sgd, design="3lc", overlap=False)


def test_forget_nonfinite_moments_keeps_finite_and_other_shapes() -> None:
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


pytestmark = pytest.mark.filterwarnings("ignore:worker 1. '.*' holds NaN or Inf after inner step")


class Offloading(torch.optim.SGD):
    """Keeps some of its state on another device, and knows what to do with it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("elsewhere", torch.zeros_like(parameter, device="meta"))
        return super().step(closure)


def offloading(model: nn.Module) -> Optimizers:
    return Offloading(model.parameters(), lr=0.01, momentum=0.9)


def poisoned(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, float, int]:
    """Worker 1's gradients are NaN in inner step 7, and so are its parameters then; all ranks continue."""
    lost = 0
    for step in range(24):
        x, y = batch(rank, step)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        lost += not bool(loss.isfinite())
        (loss * (torch.nan if (rank, step) == (1, 7) else 1.0)).backward()  # type: ignore[no-untyped-call]
        opt.step()
    opt.flush()
    moments = [state[key] for state in opt.state.values() for key in ("exp_avg", "momentum_buffer") if key in state]
    assert all(bool(each.isfinite().all()) for each in moments), "a round without this worker leads its momenta nowhere"
    return values(model), opt.traffic().get("void_rounds", 0.0), lost


def test_nonfinite_parameters_void_one_exchange() -> None:
    cases: list[tuple[str, Any]] = [
        ("local-sgd[h=3]", adamw),
        ("local-sgd[h=3]", offloading),
        ("sparseloco[h=3]", adamw),
        ("demo", inner_optimizer("demo")),
        ("streaming-diloco[h=6,fragments=3,delay=1]", adamw),
        ("streaming-diloco[h=6,fragments=2,delay=0]", adamw),
        ("diloco[h=6,delay=2]", adamw),
    ]
    for design, optimizer in cases:
        results, _ = run_cluster(wide, poisoned, workers=3, optimizer=optimizer, design=design)
        assert [void for _, void, _ in results] == [0, 1, 0], design
        assert [lost for _, _, lost in results][::2] == [0, 0] and results[1][2] <= 4, "until the next fragment is due"
        for weights, _, _ in results:
            assert torch.isfinite(weights).all() and torch.equal(weights, results[0][0]), design


def test_nonfinite_parameters_raise_if_design_asks() -> None:
    with pytest.raises((NonFiniteError, ProtocolError), match=r"'0.weight' hold NaN or Inf after inner step 8"):
        run_cluster(mlp, poisoned, workers=3, optimizer=adamw, design="local-sgd[h=3,nonfinite=raise]")
