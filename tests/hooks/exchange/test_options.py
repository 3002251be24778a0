"""Options of the hooks: the same names and defaults in all of them; wrong values are refused before ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from functools import partial
from inspect import Parameter, signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.hooks.ddp_ranks import refusal
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
WRONG: tuple[dict[str, Any], ...] = (
    {"reduce": "max"},
    {"nonfinite": "x"},
    {"scaler": object()},
    {"start_step": 1.5},
    {"start_step": None},
    {"min_numel": "3"},
    {"seed": "x"},
    {"measure_link": "no"},
    {"compression": "by-shape"},
    {"credentials": "token"},
    {"gather_mb": "1"},
    {"gather_mb": -1},
    {"timeout": timedelta(0)},
)


def test_wrong_values_are_refused_by_the_option_s_name() -> None:
    ExchangeOptions(**USUAL)
    for wrong in WRONG:
        said = refusal(partial(ExchangeOptions, **{**USUAL, **wrong}))
        assert said.startswith("ConfigError: ") and next(iter(wrong)) in said, (wrong, said)


def test_hooks_check_options_before_ranks_meet() -> None:
    w: Any = {"w": torch.zeros(3)}
    assert "seed='x'" in refusal(partial(named.compress, w, seed="x"))  # type: ignore[arg-type]
    assert "min_numel=-1" in refusal(partial(fsdp.compress, nn.Linear(2, 2), min_numel=-1))
    assert "a list came" in refusal(partial(fsdp.compress, [nn.Linear(2, 2)]))  # type: ignore[arg-type]


@pytest.mark.parametrize("compress", [ddp.compress, fsdp.compress, named.compress], ids=["ddp", "fsdp", "named"])
def test_every_hook_takes_options_by_the_same_names_and_defaults(compress: Callable[..., Any]) -> None:
    defaults = {each.name: each.default for each in fields(ExchangeOptions)}
    taken = {
        name: each.default
        for name, each in signature(compress).parameters.items()
        if each.default is not Parameter.empty and name not in ("gather", "group")  # which are one hook's own
    }
    assert len(taken) >= 13 and taken == {name: defaults[name] for name in taken}
