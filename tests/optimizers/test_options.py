"""Changes of options: told apart, merged, and refused where a peer says what may not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.server.conversation import Shard, make_plan
from thinwire.errors import ProtocolError
from thinwire.optimizers.options import CHANGEABLE, apply_changes, changes, portable_options
from thinwire.optimizers.runner import ALLOWED
from thinwire.schema import Changes, Push

GROUPS: tuple[dict[str, Any], ...] = ({"momentum": 0.9, "weight_decay": 0.0}, {"betas": [0.9, 0.99], "centered": False})


def test_changes_lead_from_one_to_the_other() -> None:
    after: tuple[dict[str, Any], ...] = ({**GROUPS[0], "momentum": 0.5}, {**GROUPS[1], "betas": [0.8, 0.99]})
    said = changes(GROUPS, after)
    assert said == ((0, {"momentum": 0.5}), (1, {"betas": [0.8, 0.99]}))
    assert apply_changes("Adam", GROUPS, said) == after
    assert changes(after, after) == ()
    assert GROUPS[0]["momentum"] == 0.9, "what held before is left as it was"


def test_what_a_peer_may_not_say() -> None:
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


def test_options_of_others_than_worker_0_do_not_count() -> None:
    quiet, loud = Shard(), Shard()
    for step in range(3):
        quiet.step(step)
        frames = loud.frames(1, step)
        loud.push(0, step, loud.frames(0, step))
        said: Changes = ((0, {"momentum": 0.1}),)
        loud.say(1, Push(step=step, tables=tuple(frames), rates=(0.1,), options=said), tuple(frames.values()))
    assert quiet.bits() == loud.bits()
