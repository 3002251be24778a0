"""Options and saved states of the hooks: names and defaults are the same in all; wrong values are refused by name."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.ddp_ranks import refusal
from thinwire.hooks import ddp, fsdp, named
from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.hooks.exchange.saved import Layout, check_saved
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
    {"timeout": 0.0},
    {"timeout": math.inf},
    {"timeout": "60"},
)


def test_options_invalid_values_raise_config_error_with_name() -> None:
    for timeout in (60, 0.5, timedelta(seconds=60)):
        ExchangeOptions(**{**USUAL, "timeout": timeout})
    for wrong in WRONG:
        said = refusal(partial(ExchangeOptions, **{**USUAL, **wrong}))
        assert said.startswith("ConfigError: ") and next(iter(wrong)) in said, (wrong, said)


def test_options_are_checked_before_connecting() -> None:
    w: Any = {"w": torch.zeros(3)}
    assert "seed='x'" in refusal(partial(named.compress, w, seed="x"))
    assert "min_numel=-1" in refusal(partial(fsdp.compress, nn.Linear(2, 2), min_numel=-1))
    assert "a list came" in refusal(partial(fsdp.compress, [nn.Linear(2, 2)]))  # type: ignore[arg-type]


def test_options_unknown_names_raise_config_error_and_fields_are_documented() -> None:
    w: Any = {"w": torch.zeros(3)}
    for compress, model in ((fsdp.compress, nn.Linear(2, 2)), (named.compress, w)):
        said = refusal(partial(compress, model, seeds=3))  # type: ignore[arg-type]
        assert "unknown option 'seeds'" in said and "'sparsity'" in said and "compress itself takes" in said, said
        assert ("start_step" in said) == (compress is fsdp.compress) and "scaler, seed, timeout" in said, said
    assert "unknown option 'reduce'" in refusal(partial(fsdp.compress, nn.Linear(2, 2), reduce="sum"))
    for each in fields(ExchangeOptions):
        assert f"        {each.name}: " in (ExchangeOptions.__doc__ or ""), each.name
    for hook in (ddp, fsdp, named):
        assert hook.ExchangeOptions is ExchangeOptions and "ExchangeOptions`" in (hook.compress.__doc__ or "")


PART: dict[str, Any] = {
    "residuals": {"w": torch.ones(2)},
    "encodes": {"w": torch.tensor([3, 3])},
    "owners": {"w": torch.tensor([0, 1])},
    "lags": {},
    "layouts": {"w": torch.tensor([-1, 2, 0])},
}
GOOD: dict[str, Any] = {"format": 1, "world_size": 2, "step": 3, "loss_scale": 1.0, "ranks": {"0": PART}}
DAMAGED: dict[str, tuple[object, str]] = {
    "no state": ([1], "format"),
    "another format": (GOOD | {"format": 2}, "format 2"),
    "no step": ({key: GOOD[key] for key in GOOD if key != "step"}, "step"),
    "infinite step": (GOOD | {"step": math.inf}, "int"),
    "ranks in words": (GOOD | {"world_size": "x"}, "world_size"),
    "scale of NaN": (GOOD | {"loss_scale": math.nan}, "loss_scale"),
    "number of ranks": (GOOD | {"ranks": 5}, "ranks"),
    "list": (GOOD | {"ranks": {"0": PART | {"residuals": {"w": [1.0]}}}}, "rank 0 .*residuals"),
    "no owners": (GOOD | {"ranks": {"0": {key: PART[key] for key in PART if key != "owners"}}}, "`owners`"),
    "sparse": (
        GOOD | {"ranks": {"0": PART | {"residuals": {"w": torch.ones(2).to_sparse()}}}},
        "rank 0 .*dense tensor",
    ),
    "NaN": (GOOD | {"ranks": {"0": PART | {"residuals": {"w": torch.tensor([math.nan])}}}}, "holds NaN or Inf"),
}


def test_saved_states_pass_checks() -> None:
    check_saved(GOOD)
    check_saved(GOOD | {"loss_scale": 0.0, "ranks": {}})


def test_damaged_states_raise_config_error_that_names_the_damage() -> None:
    for state, told in DAMAGED.values():
        with pytest.raises(tw.ConfigError, match=told):
            check_saved(state)
    for damaged in ([], [-1], [0, 2, 0], [-1, 3, 0], [-1, 2, 1], [math.nan, 2, 0]):
        with pytest.raises(tw.ConfigError, match="the state holds 'w' "):
            Layout((2,), (0,)).check("w", damaged)  # type: ignore[arg-type]
