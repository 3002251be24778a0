"""What hooks are asked for: the same in all of them; what cannot be is told before any rank is met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from inspect import Parameter, signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.hooks import ddp, fsdp, named
from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.policies.compression import PLAIN, ByShape
from thinwire.security.credentials import Credentials

USUAL: dict[str, Any] = {
    "timeout": None,
    "seed": np.int64(3),
    "credentials": Credentials(),
    "compression": ByShape(up=PLAIN, down=PLAIN),
}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"reduce": "max"}, "reduce=.max.; allowed are .mean. and .sum."),
        ({"nonfinite": "x"}, "allowed are 'raise' and 'skip'"),
        ({"scaler": object()}, "with scaler, set nonfinite='skip'"),
        ({"start_step": 1.5}, "start_step=1.5; it must be 0 or more, a whole number"),
        ({"start_step": None}, "start_step=None; it must be 0 or more"),
        ({"min_numel": "3"}, "min_numel=.3.; it must be 0 or more"),
        ({"seed": "x"}, "seed='x', measure_link=True; they are a whole number, and True or False"),
        ({"measure_link": "no"}, "measure_link='no'"),
        ({"compression": "by-shape"}, "compression='by-shape'; it is a policy"),
        ({"credentials": "token"}, r"credentials='token'; they are tw\.Credentials"),
        ({"gather_mb": "1"}, "gather_mb='1'; it must be 0 or more megabytes"),
        ({"timeout": timedelta(0)}, r"it is a datetime\.timedelta above 0"),
    ],
    ids=[
        "reduce",
        "nonfinite",
        "scaler",
        "fraction",
        "none",
        "text",
        "seed",
        "link",
        "policy",
        "token",
        "megabytes",
        "zero",
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any], told: str) -> None:
    ExchangeOptions(**USUAL)
    with pytest.raises(ConfigError, match=told):
        ExchangeOptions(**{**USUAL, **wrong})


def test_the_hooks_look_before_they_meet() -> None:
    with pytest.raises(ConfigError, match="seed='x'"):
        named.compress({"w": torch.zeros(3)}, seed="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="min_numel=-1"):
        fsdp.compress(nn.Linear(2, 2), min_numel=-1)
    with pytest.raises(ConfigError, match="a model that fully_shard has sharded; a list came"):
        fsdp.compress([nn.Linear(2, 2)])  # type: ignore[arg-type]


@pytest.mark.parametrize("compress", [ddp.compress, fsdp.compress, named.compress], ids=["ddp", "fsdp", "named"])
def test_every_hook_takes_options_by_the_same_names_and_defaults(compress: Callable[..., Any]) -> None:
    defaults = {each.name: each.default for each in fields(ExchangeOptions)}
    taken = {
        name: each.default
        for name, each in signature(compress).parameters.items()
        if each.default is not Parameter.empty and name not in ("gather", "group")  # which are one hook's own
    }
    assert len(taken) >= 13 and taken == {name: defaults[name] for name in taken}
