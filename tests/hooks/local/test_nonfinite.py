"""NaN and Inf in local updates: one worker's parameters cost it a round, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import Optimizers, adamw, batch, inner_optimizer, mlp, values, wide
from thinwire.errors import NonFiniteError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer

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
    """Worker 1's gradients are NaN in inner step 7, and so are its parameters then; all go on."""
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


def test_a_worker_whose_parameters_are_not_finite_sits_out_one_exchange() -> None:
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


def test_parameters_that_are_not_finite_end_the_training_where_the_design_says_so() -> None:
    with pytest.raises((NonFiniteError, ProtocolError), match=r"'0.weight' hold NaN or Inf after inner step 8"):
        run_cluster(mlp, poisoned, workers=3, optimizer=adamw, design="local-sgd[h=3,nonfinite=raise]")


def test_moments_that_are_not_finite_are_forgotten_together() -> None:
    """A gradient of 1e25 has a finite first moment, and an infinite second one."""

    def overflowing(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(12):
            x, y = batch(rank, step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            if (rank, step) == (1, 5):
                for name, value in (("0.weight", 1e25), ("3.weight", torch.nan)):
                    gradient = model.get_parameter(name).grad
                    assert gradient is not None
                    gradient[0, 0] = value
            opt.step()
        opt.flush()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    for found in run_cluster(mlp, overflowing, optimizer=adamw, design="local-sgd[h=2]")[0]:
        assert found.abs().max() < 2


def test_a_step_that_a_grad_scaler_skips_changes_nothing_and_counts() -> None:
    """Every worker's H steps stay H steps, and the rate of a step that was not taken steers nothing."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, list[float]]:
        scaler, rates = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
        for step in range(8):
            x, y = batch(rank, step)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            overflow = torch.inf if (rank, step) == (1, 1) else 1
            scaler.scale(loss * overflow).backward()  # type: ignore[no-untyped-call]
            scaler.step(opt)
            scaler.update()
            if step == 1:
                rates = opt.state_dict()["steering"]["rates"]
        assert opt.steps_done == 8
        opt.flush()
        return values(model), rates

    found, _ = run_cluster(mlp, train, optimizer=adamw, design="local-sgd[h=4]")
    assert torch.isfinite(found[0][0]).all() and torch.equal(found[0][0], found[1][0])
    assert [rates for _, rates in found] == [[0.02], [0.01]]
