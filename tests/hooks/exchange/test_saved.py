"""States that are damaged are refused whole: nothing of them is taken, and nothing but ConfigError leaves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import ddp, mlp, run_ranks, train
from thinwire.hooks.exchange.saved import check_saved

State = dict[str, Any]
PART: State = {
    "residuals": {"w": torch.ones(2)},
    "encodes": {"w": torch.tensor([3, 3])},
    "owners": {"w": torch.tensor([0, 1])},
    "lags": {},
}


def with_part(**other: Any) -> Callable[[State], State]:
    return lambda state: state | {"ranks": {"0": PART | other}}


def good() -> State:
    return {
        "format": 1,
        "world_size": 2,
        "step": 3,
        "loss_scale": 1.0,
        "ranks": {"0": PART},
    }


def test_what_a_hook_saves_is_taken() -> None:
    check_saved(good())
    check_saved(good() | {"loss_scale": 0.0, "ranks": {}})


@pytest.mark.parametrize(
    ("damage", "told"),
    {
        "no state": (lambda s: [1], "has format none: it is a list"),
        "another format": (lambda s: s | {"format": 2}, "has format 2; this thinwire reads 1"),
        "no step": (lambda s: {key: s[key] for key in s if key != "step"}, "damaged: it has no step"),
        "infinite step": (lambda s: s | {"step": math.inf}, "damaged: cannot convert float infinity"),
        "step below 0": (lambda s: s | {"step": -5}, "damaged: it is of step -5 of 2 ranks"),
        "ranks in words": (lambda s: s | {"world_size": "x"}, "damaged: invalid literal"),
        "scale of NaN": (lambda s: s | {"loss_scale": math.nan}, "damaged: its loss_scale is nan"),
        "scale too small": (lambda s: s | {"loss_scale": 1e-320}, "damaged: its loss_scale is 1e-320"),
        "scale below 0": (lambda s: s | {"loss_scale": -1.0}, "damaged: its loss_scale is -1"),
        "ranks": (lambda s: s | {"ranks": 5}, "damaged: its ranks are a int"),
        "a rank": (lambda s: s | {"ranks": {"0": 5}}, "damaged: the part of rank 0 is a int"),
        "no owners": (
            lambda s: s | {"ranks": {"0": {key: PART[key] for key in PART if key != "owners"}}},
            "the state of rank 0 lacks 'owners'",
        ),
        "a list": (with_part(residuals={"w": [1.0]}), "the residuals of rank 0 are no tensors by name"),
        "encodes": (with_part(encodes=[1]), "the encodes of rank 0 are no tensors by name"),
        "sparse": (with_part(residuals={"w": torch.ones(2).to_sparse()}), "the residuals of rank 0 are no tensors"),
        "NaN": (
            with_part(residuals={"w": torch.tensor([1.0, math.nan])}),
            "what rank 0 has not sent of 'w' is not finite",
        ),
    }.values(),
)
def test_what_is_damaged_is_named(damage: Callable[[State], object], told: str) -> None:
    with pytest.raises(tw.ConfigError, match=told):
        check_saved(damage(good()))


def run_damaged(rank: int) -> list[tuple[str, bool]]:
    """What a hook says of damaged states, and whether it then is what it was."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "3lc", measure_link=False)
    train(model, rank, 2)
    saved, said = copy.deepcopy(state.state_dict()), []
    for key, wrong in (("loss_scale", math.nan), ("ranks", {str(rank): {}}), ("world_size", [2])):
        with pytest.raises(tw.ConfigError) as refused:
            state.load_state_dict(saved | {key: wrong})
        now = state.state_dict()
        kept, here = (each["ranks"][str(rank)]["residuals"] for each in (saved, now))
        same = all(torch.equal(kept[name], here[name]) for name in kept) and now["step"] == saved["step"]
        said.append((str(refused.value), same))
    state.load_state_dict(saved)
    return said


def test_a_hook_that_refuses_a_state_goes_on_with_its_own() -> None:
    for scale, empty, world in run_ranks(2, run_damaged):
        assert scale == ("the state is damaged: its loss_scale is nan", True)
        assert "lacks 'residuals', 'encodes', 'owners', 'lags'" in empty[0] and empty[1]
        assert world[0].startswith("the state is damaged: int() argument must be") and world[1]
