"""The runner's optimizer is torch's own, with the options that the worker's had."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from thinwire.errors import ProtocolError
from thinwire.optimizers.options import LOCAL_OPTIONS, Settings, portable_options
from thinwire.optimizers.runner import ALLOWED, OptimizerRunner

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, {"momentum": 0.5, "dampening": 0.1}],
    "Adam": [{}, {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.01, "amsgrad": True}],
    "AdamW": [{}, {"betas": (0.7, 0.9), "weight_decay": 0.3}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adadelta": [{}, {"rho": 0.7, "eps": 1e-3}],
    "Adamax": [{}, {"betas": (0.8, 0.9), "weight_decay": 0.1}],
    "NAdam": [{}, {"momentum_decay": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"betas": (0.5, 0.6), "weight_decay": 0.1}],
    "RMSprop": [{}, {"alpha": 0.7, "momentum": 0.9, "centered": True}, {"maximize": True}],
    "SignSGD": [{}, {"sign": False}],
}
CASES = [(name, options) for name, all_options in OPTIONS.items() for options in all_options]


def travelled(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """The groups' options as a plan brings them: through JSON and back."""
    groups = [portable_options(group, optimizer.defaults) for group in optimizer.param_groups]
    return tuple(json.loads(json.dumps(groups)))


def start(count: int = 2) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, 6).view(3, 2) * (index + 1) for index in range(count)]


def grad(step: int, index: int) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * step + index))


def test_seven_steps_equal_plain_torch_for_every_optimizer_on_the_list() -> None:
    assert OPTIONS.keys() == ALLOWED.keys()
    for name, options in CASES:
        plain, values = start(), start()
        kind: Any = ALLOWED[name]
        optimizer = kind(plain, lr=0.05, **options)
        runner = OptimizerRunner(name, travelled(optimizer), [(0, each) for each in values])
        for step in range(7):
            rate = 0.05 / (step + 1)
            runner.set(Settings((rate,), travelled(optimizer)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            for index, tensor in enumerate(plain):
                tensor.grad = grad(step, index)
            optimizer.step()
            # A shard updates table by table, as gradients become complete.
            for index in (1, 0):
                runner.step([values[index]], [grad(step, index)])
            for ours, theirs in zip(values, plain, strict=True):
                assert torch.equal(ours, theirs), (name, options, step)
                assert ours.grad is None
        assert not torch.equal(values[0], start()[0])


def test_groups_have_options_and_rates_of_their_own() -> None:
    plain = start(3)
    groups: list[dict[str, Any]] = [
        {"params": plain[:1], "weight_decay": 0.5},
        {"params": []},
        {"params": plain[1:], "momentum": 0.9},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    values = start(3)
    runner = OptimizerRunner("SGD", travelled(optimizer), zip([0, 2, 2], values, strict=True))
    rates = (0.1, 7.0, 0.01)
    runner.set(Settings(rates, travelled(optimizer)))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for step in range(3):
        for index, tensor in enumerate(plain):
            tensor.grad = grad(step, index)
        optimizer.step()
        runner.step(values, [grad(step, index) for index in range(3)])
    for ours, theirs in zip(values, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_options_survive_json_and_local_ones_stay() -> None:
    for name, options in CASES:
        kind: Any = ALLOWED[name]
        optimizer = kind([torch.zeros(1)], lr=0.125, **options)
        group = {**optimizer.param_groups[0], "initial_lr": 0.5, "max_lr": 3.0, "label": object()}
        portable = portable_options(group, optimizer.defaults)
        assert not portable.keys() & (LOCAL_OPTIONS | {"max_lr", "label"}), name
        back = json.loads(json.dumps(portable))
        assert back == portable, name
        for key, value in options.items():
            assert (tuple(back[key]) if isinstance(value, tuple) else back[key]) == value, (name, key)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1), weight_decay=0.5)
    group = {**optimizer.param_groups[0], "momentum": torch.tensor(0.75)}
    assert portable_options(group, optimizer.defaults)["momentum"] == 0.75, "numbers in tensors travel as numbers"


def test_what_is_not_built() -> None:
    table = [(0, torch.zeros(3, 2))]
    for key in sorted(LOCAL_OPTIONS):  # a plan may not choose how a server computes
        with pytest.raises(ProtocolError, match=rf"Adam .*'{key}'"):
            OptimizerRunner("Adam", [{key: True}], table)
    with pytest.raises(ProtocolError, match="'LBFGS'"):
        OptimizerRunner("LBFGS", [{}], table)
    with pytest.raises(ProtocolError, match="no table that the optimizer could update"):
        OptimizerRunner("SGD", [{}], [])
