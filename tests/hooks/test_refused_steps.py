"""A step or a flush that is refused leaves everything as it was, and is refused once more where nothing was mended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import Optimizers, adamw, alone, inner_step, mlp, sgd, values, weights
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer


def spoil(model: nn.Module, opt: DistributedOptimizer) -> None:
    """A step's backward pass, after which the last gradient holds NaN."""
    opt.zero_grad()
    model(torch.ones(8, 12)).square().mean().backward()
    [*_, last] = model.parameters()
    assert last.grad is not None
    last.grad.view(-1)[0] = torch.nan


@pytest.mark.parametrize("name", ["3lc", "doublesqueeze-1bit", "terngrad[ema=0.5]"])
def test_a_step_with_nan_in_the_last_tensor_has_encoded_none(name: str) -> None:
    with alone(name, overlap=False, min_numel=1) as (model, _, opt):
        for step in range(2):
            inner_step(model, opt, 0, step)
        opt.sync()
        before, held = weights(model), opt.state_dict()
        spoil(model, opt)
        with pytest.raises(NonFiniteError, match=r"hold NaN or Inf; nothing was changed"):
            opt.step()
        after = opt.state_dict()
        for context, other in zip(held["contexts"].values(), after["contexts"].values(), strict=True):
            for key, value in context.items():
                assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        averages = [state.get("averages", {}) for state in (held, after)]
        assert all(torch.equal(value, averages[1][key]) for key, value in averages[0].items())
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        opt.step()
        opt.sync()
        waits = any(context.get("residual") is not None for context in held["contexts"].values())
        assert waits or torch.equal(weights(model), before), "nothing of the batch that was refused has been sent"


def test_values_whose_sum_overflows_are_finite_all_the_same() -> None:
    with alone("3lc", overlap=False) as (model, _, opt):
        for each in model.parameters():
            each.grad = torch.full_like(each, 3e38)
        held = opt._worker.model
        assert held.not_finite() is None
        [*_, last] = model.parameters()
        assert last.grad is not None
        last.grad[0] = -torch.inf
        table = held.not_finite()
        assert table is not None and table.spec.name == "3.bias"


@pytest.mark.parametrize("at", [2, 3])
def test_a_worker_that_averages_weights_takes_no_step_by_nan_where_it_is_skipped(at: int) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, float]:
        for step in range(8):
            if rank == 0 and step == at:
                spoil(model, opt)
                opt.step()
            else:
                inner_step(model, opt, rank, step)
        opt.flush()
        return weights(model), opt.counters["skipped_updates"]

    (one, skipped), (other, _) = run_cluster(mlp, train, design="entropy[nonfinite=skip]", steps_per_epoch=2)[0]
    assert one.isfinite().all() and torch.equal(one, other)
    assert skipped <= len(list(mlp(0).parameters())), "one exchange at most is nobody's"


def test_a_flush_that_was_refused_is_not_taken_for_done() -> None:
    with alone("diloco[h=4,nonfinite=raise]", adamw) as (model, _, opt):
        for step in range(2):
            inner_step(model, opt, 0, step)
        first = next(model.parameters())
        kept = first.detach().clone()
        with torch.no_grad():
            first[0, 0] = torch.nan
        for _ in range(2):
            with pytest.raises(NonFiniteError):
                opt.flush()
        with torch.no_grad():
            first.copy_(kept)
        opt.flush()
        assert opt.clock == 1
        with opt.shared_weights():
            shared = values(model)
        assert torch.equal(values(model), shared)


def test_options_that_may_not_change_are_refused_until_they_are_back_and_before_the_inner_step() -> None:
    with alone("diloco[h=2]", adamw) as (model, _, opt):
        inner_step(model, opt, 0, 0)
        before = weights(model)
        opt.outer_groups[0]["momentum"] = 0.5
        for _ in range(3):
            with pytest.raises(ConfigError, match="the outer optimizer's options were changed"):
                inner_step(model, opt, 0, 1)
            assert opt.steps_done == 1 and torch.equal(weights(model), before)
        opt.outer_groups[0]["momentum"] = 0.9
        inner_step(model, opt, 0, 1)
        assert (opt.steps_done, opt.clock) == (2, 1)


def two(model: nn.Module) -> Optimizers:
    first, *others = model.parameters()
    return [torch.optim.AdamW([first], lr=0.01), torch.optim.AdamW(others, lr=0.01)]


@pytest.mark.parametrize(("name", "optimizer"), [("update", two), ("update", adamw), ("3lc", sgd)])
def test_a_group_that_any_inner_optimizer_is_given_later_is_refused(name: str, optimizer: Any) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        inner_step(model, opt, rank, 0)
        inner = opt._inner
        last = getattr(inner, "optimizers", [inner])[-1]
        last.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        inner_step(model, opt, rank, 1)

    with pytest.raises((ConfigError, ProtocolError), match="has been added is exchanged by nobody"):
        run_cluster(mlp, train, workers=1, optimizer=optimizer, design=name)


def test_rates_are_followed_after_the_inner_optimizer_has_loaded_a_state() -> None:
    with alone("fp32") as (model, inner, opt):
        inner_step(model, opt, 0, 0)
        inner.load_state_dict(inner.state_dict())
        torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 0.0)
        assert opt.param_groups[0]["lr"] == 0
        opt.sync()
        before = weights(model)
        inner_step(model, opt, 0, 1)
        opt.sync()
        assert torch.equal(weights(model), before)
