"""A refused step or flush changes no state, and is refused again until its cause is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.local_runs import alone, batch, inner_step, weights
from tests.hooks.server_runs import one_step
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.hooks.distribute import DistributedOptimizer


def spoil(model: nn.Module, opt: DistributedOptimizer) -> None:
    """A step's backward pass, after which the last gradient holds NaN."""
    opt.zero_grad()
    model(torch.ones(8, 12)).square().mean().backward()
    [*_, last] = model.parameters()
    assert last.grad is not None
    last.grad.view(-1)[0] = torch.nan


def held(opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
    """All tensors of the state, by their paths."""

    def walk(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value.clone()
        elif isinstance(value, dict):
            for key, each in value.items():
                walk(f"{path}/{key}", each)

    found: dict[str, torch.Tensor] = {}
    state = opt.state_dict()
    walk("contexts", state["contexts"])
    walk("averages", state.get("averages", {}))
    return found


def test_refused_step_keeps_residuals_and_averages_bit_identical() -> None:
    """With NaN in the last tensor no other one has been encoded, accumulated or averaged."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("3lc", {}),
        ("doublesqueeze-1bit", {}),
        ("terngrad[ema=0.5]", {}),
        ("3lc", {"consistency": "local[steps=4]"}),
    ]
    for name, options in cases:
        with alone(name, overlap=False, min_numel=1, **options) as (model, _, opt):
            for step in range(2):
                inner_step(model, opt, 0, step)
            opt.sync()
            before, state = weights(model), held(opt)
            spoil(model, opt)
            with pytest.raises(NonFiniteError, match="nothing was changed"):
                opt.step()
            after = held(opt)
            assert state.keys() == after.keys() and all(torch.equal(state[key], after[key]) for key in state)
            for each in model.parameters():
                each.grad = torch.zeros_like(each)
            opt.step()
            opt.sync()
            waits = any("residual" in key for key in state)
            assert waits or torch.equal(weights(model), before), "nothing of the batch that was refused has been sent"


def test_nan_in_a_backward_pass_names_the_parameter_and_keeps_its_residual() -> None:
    with alone("3lc") as (model, _, opt):
        for step in range(2):
            one_step(model, opt, 0, step)
        before = held(opt)["contexts/0.weight/residual"]
        opt.zero_grad()
        x, _ = batch(0, 3)
        with pytest.raises(NonFiniteError, match=r"gradient of (0|1|3)\.(weight|bias): .*NaN"):
            (torch.nan * model(x)).sum().backward()
        assert torch.equal(before, held(opt)["contexts/0.weight/residual"])


def _other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _other_parameters(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


MOVED: list[tuple[Callable[[nn.Module], Any], str]] = [
    (nn.Module.double, r"'0.weight' was moved .* float64 on cpu .* float32 on cpu"),
    (_other_memory, "'0.weight' was moved"),
    (_other_parameters, "another parameter in place of '0.weight'"),
]


@pytest.mark.filterwarnings("ignore:model.state_dict")  # one of the changes takes it within a round
@pytest.mark.parametrize("design", ["local-sgd[h=4]", "3lc"])
def test_moved_model_raises_config_error(design: str) -> None:
    for change, named in MOVED:
        with alone(design) as (model, _, opt):
            inner_step(model, opt, 0, 0)
            opt.sync()
            change(model)
            with pytest.raises(ConfigError, match=named):
                opt.step()


def test_overflowing_weights_are_named_in_error() -> None:
    def backward() -> None:
        opt.zero_grad()
        model(torch.ones(8, 12)).square().mean().backward()

    with alone("fp32", overlap=False) as (model, _, opt):
        opt.param_groups[0]["lr"] = 1e38
        backward()
        opt.step()
        backward()
        with pytest.raises(NonFiniteError, match=r"after update 1 '.*weight' holds values up to .*e\+3") as told:
            opt.step()
    assert "GradScaler" not in str(told.value)
