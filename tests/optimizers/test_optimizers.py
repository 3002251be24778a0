"""Optimizers at a server: steps equal torch's; options and rates change as they may; momentum at each end."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.server.conversation import Shard, make_plan
from thinwire.errors import ProtocolError
from thinwire.optimizers.options import CHANGEABLE, LOCAL_OPTIONS, Settings, apply_changes, changes, portable_options
from thinwire.optimizers.outer_momentum import OuterMomentum
from thinwire.optimizers.runner import ALLOWED, OptimizerRunner
from thinwire.schema import Changes, Push

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


def test_portable_options_survive_json_without_local_ones() -> None:
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


def test_invalid_optimizers_are_refused() -> None:
    table = [(0, torch.zeros(3, 2))]
    for key in sorted(LOCAL_OPTIONS):  # a plan may not choose how a server computes
        with pytest.raises(ProtocolError, match=rf"Adam .*'{key}'"):
            OptimizerRunner("Adam", [{key: True}], table)
    with pytest.raises(ProtocolError, match="'LBFGS'"):
        OptimizerRunner("LBFGS", [{}], table)
    with pytest.raises(ProtocolError, match="no table that the optimizer could update"):
        OptimizerRunner("SGD", [{}], [])


GROUPS: tuple[dict[str, Any], ...] = ({"momentum": 0.9, "weight_decay": 0.0}, {"betas": [0.9, 0.99], "centered": False})


def test_changes_applied_give_the_new_options() -> None:
    after: tuple[dict[str, Any], ...] = ({**GROUPS[0], "momentum": 0.5}, {**GROUPS[1], "betas": [0.8, 0.99]})
    said = changes(GROUPS, after)
    assert said == ((0, {"momentum": 0.5}), (1, {"betas": [0.8, 0.99]}))
    assert apply_changes("Adam", GROUPS, said) == after
    assert changes(after, after) == ()
    assert GROUPS[0]["momentum"] == 0.9, "what held before is left as it was"


def test_invalid_changes_of_a_peer_raise_protocol_error() -> None:
    refused: list[tuple[int, str, Any, str]] = [
        (2, "momentum", 0.5, "group 2"),
        (-1, "momentum", 0.5, "group -1"),
        (0, "params", [], "'params' changed"),
        (0, "betas", [0.1, 0.2], "'betas' changed"),
        (1, "centered", True, "'centered' changed"),
        (0, "momentum", True, "numbers were expected"),
        (0, "momentum", [0.5], "numbers were expected"),
        (1, "betas", [0.5], "numbers were expected"),
        (1, "betas", [0.5, 1.0], r"\[0, 1\)"),
        (0, "weight_decay", float("inf"), "weight_decay=inf"),
        (0, "weight_decay", "0.5", "numbers were expected"),
    ]
    for group, option, value, named in refused:
        with pytest.raises(ProtocolError, match=named):
            apply_changes("Adam", GROUPS, ((group, {option: value}),))
    # It would need memory from the past.
    with pytest.raises(ProtocolError, match="RMSprop: a momentum that was 0"):
        apply_changes("RMSprop", ({"momentum": 0},), ((0, {"momentum": 0.5}),))
    assert apply_changes("SGD", ({"momentum": 0},), ((0, {"momentum": 0.5}),))[0]["momentum"] == 0.5
    shard = Shard(make_plan())
    shard.say(0, Push(step=0, tables=(), rates=(0.1,), options=((0, {"nesterov": True}),)))
    assert "worker 0: SGD: 'nesterov'" in str(shard.core.failed), "the training ends with the reason"


def test_every_option_that_may_change_does_so_in_the_middle_of_training() -> None:
    for name in ALLOWED:
        kind: Any = ALLOWED[name]
        value = torch.ones(3)
        optimizer = kind([value], lr=0.1)
        [group] = optimizer.param_groups
        portable = portable_options(group, optimizer.defaults)
        for key in CHANGEABLE.keys() & portable.keys():
            for _ in range(2):
                value.grad = torch.full((3,), 0.5)
                optimizer.step()
            new = [0.5, 0.6] if isinstance(portable[key], list) else 0.25
            if (name, key) in (("RMSprop", "momentum"),):
                continue
            [after] = apply_changes(name, (portable,), ((0, {key: new}),))
            group[key] = tuple(after[key]) if isinstance(after[key], list) else after[key]
            value.grad = torch.full((3,), 0.5)
            optimizer.step()
            assert torch.isfinite(value).all(), (name, key)


def test_options_of_workers_other_than_0_are_ignored() -> None:
    quiet, loud = Shard(), Shard()
    for step in range(3):
        quiet.step(step)
        frames = loud.frames(1, step)
        loud.push(0, step, loud.frames(0, step))
        said: Changes = ((0, {"momentum": 0.1}),)
        loud.say(1, Push(step=step, tables=tuple(frames), rates=(0.1,), options=said), tuple(frames.values()))
    assert quiet.bits() == loud.bits()


def test_outer_momentum_equals_torch_nesterov_uncompressed() -> None:
    random, rate = torch.Generator().manual_seed(1), 0.7
    for momentum in (0.3, 0.9):
        start = torch.randn(50, generator=random)
        sent, weight, outer = start.clone(), torch.nn.Parameter(start.clone()), OuterMomentum(momentum)
        optimizer = torch.optim.SGD([weight], lr=rate, momentum=momentum, nesterov=True)
        outer.begin(sent)
        for _ in range(40):
            mean = torch.randn(50, generator=random)
            weight.grad = mean
            optimizer.step()
            sent -= rate * mean
            outer.follow(sent)
            assert outer.ahead is not None
            torch.testing.assert_close(sent + outer.ahead, weight.detach(), rtol=1e-5, atol=1e-5)


def test_outer_momentum_loaded_late_has_the_same_bits() -> None:
    sent, first, late = torch.zeros(9), OuterMomentum(0.9), OuterMomentum(0.9)
    first.begin(sent)
    for step in range(6):
        if step == 3:
            assert first.anchor is not None and first.ahead is not None
            late.load(first.anchor.clone(), first.ahead.clone())
        sent += torch.randn(9, generator=torch.Generator().manual_seed(step))
        for end in (first, late)[: 1 + (step >= 3)]:
            end.follow(sent)
    assert first.ahead is not None and late.ahead is not None and torch.equal(first.ahead, late.ahead)


def test_outer_momentum_refuses_a_state_that_is_not_finite() -> None:
    outer = OuterMomentum(0.9)
    outer.begin(torch.zeros(2))
    with pytest.raises(ProtocolError, match="a momentum that is not finite"):
        outer.load(torch.zeros(2), torch.tensor([0.0, torch.inf]))
    assert outer.ahead is not None and torch.equal(outer.ahead, torch.zeros(2))
