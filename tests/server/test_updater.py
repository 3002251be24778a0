"""The server's optimizer is torch's own, with the options that the worker's had."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from thinwire.errors import ProtocolError
from thinwire.schema import Plan, TableSpec
from thinwire.server.options import LOCAL_OPTIONS, portable_options
from thinwire.server.updater import ALLOWED, Settings, Updater

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
}
CASES = [(name, options) for name, all_options in OPTIONS.items() for options in all_options]


def plan_of(optimizer: torch.optim.Optimizer, group_of: list[int] | None = None) -> Plan:
    """The plan as it travels: through JSON and back."""
    groups = json.loads(json.dumps([portable_options(g, optimizer.defaults) for g in optimizer.param_groups]))
    return Plan(
        workers=1,
        tables=tuple(
            TableSpec(name=f"t{index}", shape=(3, 2), group=group) for index, group in enumerate(group_of or [0, 0])
        ),
        codecs=({"id": "fp32"},),
        optimizer=type(optimizer).__name__,
        groups=tuple(groups),
    )


def start(count: int = 2) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, 6).view(3, 2) * (index + 1) for index in range(count)]


def grad(step: int, index: int) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * step + index))


def test_every_optimizer_on_the_list_is_tried_below() -> None:
    assert OPTIONS.keys() == ALLOWED.keys()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_seven_steps_equal_plain_torch(name: str, options: dict[str, Any]) -> None:
    plain = start()
    optimizer: Any = ALLOWED[name]
    optimizer = optimizer(plain, lr=0.05, **options)
    values: list[torch.Tensor] = start()
    updater = Updater(plan_of(optimizer), values)
    for step in range(7):
        rate = 0.05 / (step + 1)
        updater.set(Settings((rate,), plan_of(optimizer).groups))
        for group in optimizer.param_groups:
            group["lr"] = rate
        for index, tensor in enumerate(plain):
            tensor.grad = grad(step, index)
        optimizer.step()
        # The server updates table by table, as gradients become complete.
        for index in (1, 0):
            updater.step([values[index]], [grad(step, index)])
        for ours, theirs in zip(values, plain, strict=True):
            assert torch.equal(ours, theirs)
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
    updater = Updater(plan_of(optimizer, [0, 2, 2]), values)
    rates = (0.1, 7.0, 0.01)
    updater.set(Settings(rates, plan_of(optimizer).groups))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for step in range(3):
        for index, tensor in enumerate(plain):
            tensor.grad = grad(step, index)
        optimizer.step()
        updater.step(values, [grad(step, index) for index in range(3)])
    for ours, theirs in zip(values, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_options_survive_json_and_local_ones_stay(name: str, options: dict[str, Any]) -> None:
    kind: Any = ALLOWED[name]
    optimizer = kind([torch.zeros(1)], lr=0.125, **options)
    group = {**optimizer.param_groups[0], "initial_lr": 0.5, "max_lr": 3.0, "label": object()}
    portable = portable_options(group, optimizer.defaults)
    assert not portable.keys() & (LOCAL_OPTIONS | {"max_lr", "label"})
    back = json.loads(json.dumps(portable))
    assert back == portable
    for key, value in options.items():
        assert (tuple(back[key]) if isinstance(value, tuple) else back[key]) == value


def test_numbers_in_tensors_travel_as_numbers() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1), weight_decay=0.5)
    group = {**optimizer.param_groups[0], "momentum": torch.tensor(0.75)}
    assert portable_options(group, optimizer.defaults)["momentum"] == 0.75


def test_a_table_that_is_a_buffer_is_none_of_its_business() -> None:
    optimizer = torch.optim.SGD(start(), lr=0.1)
    values = start()
    updater = Updater(plan_of(optimizer), [values[0], None])
    assert [group["params"] for group in updater.optimizer.param_groups] == [[values[0]]]


@pytest.mark.parametrize("key", sorted(LOCAL_OPTIONS))
def test_a_plan_may_not_choose_how_the_server_computes(key: str) -> None:
    plan = Plan(
        workers=1,
        tables=(TableSpec(name="t", shape=(3, 2)),),
        codecs=({"id": "fp32"},),
        optimizer="Adam",
        groups=({key: True},),
    )
    with pytest.raises(ProtocolError, match=rf"Adam does not take \['{key}'\]"):
        Updater(plan, start(1))
