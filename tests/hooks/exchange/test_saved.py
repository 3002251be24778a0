"""`check_saved` refuses damaged states with ConfigError; what a hook does then is tested in `ddp/test_state.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.hooks.exchange.saved import check_saved

PART: dict[str, Any] = {
    "residuals": {"w": torch.ones(2)},
    "encodes": {"w": torch.tensor([3, 3])},
    "owners": {"w": torch.tensor([0, 1])},
    "lags": {},
}
GOOD: dict[str, Any] = {"format": 1, "world_size": 2, "step": 3, "loss_scale": 1.0, "ranks": {"0": PART}}
DAMAGED: dict[str, tuple[object, str]] = {
    "no state": ([1], "format"),
    "another format": (GOOD | {"format": 2}, "format 2"),
    "no step": ({key: GOOD[key] for key in GOOD if key != "step"}, "step"),
    "infinite step": (GOOD | {"step": math.inf}, "infinity"),
    "step below 0": (GOOD | {"step": -5}, "step -5"),
    "step in words": (GOOD | {"step": "x"}, "'x'"),
    "ranks in words": (GOOD | {"world_size": "x"}, "'x'"),
    "ranks in a list": (GOOD | {"world_size": [2]}, "list"),
    "scale of NaN": (GOOD | {"loss_scale": math.nan}, "loss_scale is nan"),
    "scale too small": (GOOD | {"loss_scale": 1e-320}, "loss_scale is 1e-320"),
    "scale below 0": (GOOD | {"loss_scale": -1.0}, "loss_scale is -1"),
    "number of ranks": (GOOD | {"ranks": 5}, "ranks are a int"),
    "part of a rank": (GOOD | {"ranks": {"0": 5}}, "rank 0 is a int"),
    "list": (GOOD | {"ranks": {"0": PART | {"residuals": {"w": [1.0]}}}}, "residuals of rank 0"),
    "no owners": (GOOD | {"ranks": {"0": {key: PART[key] for key in PART if key != "owners"}}}, "lacks 'owners'"),
    "encodes": (GOOD | {"ranks": {"0": PART | {"encodes": [1]}}}, "encodes of rank 0"),
    "sparse": (GOOD | {"ranks": {"0": PART | {"residuals": {"w": torch.ones(2).to_sparse()}}}}, "residuals of rank 0"),
    "NaN": (GOOD | {"ranks": {"0": PART | {"residuals": {"w": torch.tensor([math.nan])}}}}, "'w' is not finite"),
}


def test_saved_states_are_taken() -> None:
    check_saved(GOOD)
    check_saved(GOOD | {"loss_scale": 0.0, "ranks": {}})


def test_damaged_states_raise_config_error_that_names_the_damage() -> None:
    for state, told in DAMAGED.values():
        with pytest.raises(tw.ConfigError, match=told):
            check_saved(state)
