"""`ddp.compress` refuses models and loops that it cannot serve, and settings or models that differ by rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import thinwire as tw
from tests.hooks.ddp_ranks import ddp, mlp, refusal, run_cases, train

DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"codec": "3lc", "sparsity": 1.5}, "codec of 0.weight.sparsity = 1.5 and rank 0 has 1.0"),
    "codec": ({"codec": "int8"}, "codec.id = 'int8' and rank 0 has '3lc'"),
    "start_step": ({"codec": "3lc", "start_step": 4}, "start_step = 4 and rank 0 has 0"),
    "gather_mb": ({"codec": "3lc", "gather_mb": 0}, "gather_mb = 0.0 and rank 0 has 4.0"),
    "nonfinite": ({"codec": "3lc", "nonfinite": "skip"}, "nonfinite = 'skip' and rank 0 has 'raise'"),
    "auto": ({"codec": "auto"}, "codec.id = 'auto' and rank 0 has '3lc'"),
    "names": ({"codec": "3lc"}, ""),
}
"""Settings of rank 2 alone, and what all ranks are told of them."""
MISUSE = {
    "hooked already": "has the hook thinwire_hook already",
    "not wrapped": "wrap it first",
    "sparse gradients": "sparse=False",
    "option out of range": r"[1, 2)",
    "unknown codec": "'four'",
    "pattern without a parameter": "match no parameter",
    "options beside a codec": "is a codec already",
    "certificates": "token",
    "auto with an option": "sparsity",
    "auto with a codec down": "codec_down",
    "auto without lag": "lag_limit=0",
    "auto for another target": "target='speed'",
    "lag_limit without auto": "lag_limit",
    "mixed precision": "torch.autocast",
    "compiled autograd": "python_reducer",
    "join by remaining ranks": "divides gradients by the ranks that still have data",
}
"""Refused calls, and a part of each message."""


def run_misuse(rank: int) -> dict[str, str]:
    model, fresh = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    ddp.compress(model, "fp32", measure_link=False)
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Linear(8, 4)))
    low = DistributedDataParallel(mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "hooked already": (model, {}),
        "not wrapped": (mlp(), {}),
        "sparse gradients": (sparse, {}),
        "option out of range": (fresh, {"codec": "3lc", "sparsity": 3.0}),
        "unknown codec": (fresh, {"codec": "four"}),
        "pattern without a parameter": (fresh, {"codecs": {"conv*": "int8"}}),
        "options beside a codec": (fresh, {"codec": tw.codec("3lc"), "sparsity": 1.5}),
        "certificates": (fresh, {"credentials": tw.Credentials(ca="ca.pem")}),
        "auto with an option": (fresh, {"codec": "auto", "sparsity": 1.5}),
        "auto with a codec down": (fresh, {"codec": "auto", "codec_down": "int8"}),
        "auto without lag": (fresh, {"codec": "auto", "lag_limit": 0}),
        "auto for another target": (fresh, {"codec": "auto", "target": "speed"}),
        "lag_limit without auto": (fresh, {"codec": "3lc", "lag_limit": 5}),
        "mixed precision": (low, {}),
    }
    found = {name: refusal(partial(ddp.compress, given, **options)) for name, (given, options) in calls.items()}
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    found["compiled autograd"] = refusal(lambda: ddp.compress(DistributedDataParallel(mlp()), "fp32"))
    torch._dynamo.config.optimize_ddp = before

    def join() -> None:
        with model.join(divide_by_initial_world_size=False):
            train(model, rank, 2)

    found["join by remaining ranks"] = refusal(join)
    return found


def run_different(rank: int) -> list[str]:
    texts = []
    for name, (options, _) in DIFFERENT.items():
        inner = mlp()
        if rank == 2 and name == "names":  # the same shapes under other names: DDP itself does not look at names
            inner = nn.Sequential()
            for index, layer in enumerate(mlp()):
                inner.add_module(f"layer{index}", layer)
        given = options if rank == 2 else {"codec": "3lc"}
        call = partial(ddp.compress, DistributedDataParallel(inner), measure_link=False, **given)
        texts.append(refusal(call))
    return texts


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    return run_cases(3, {"misuse": (run_misuse,), "different": (run_different,)})


def test_models_loops_and_options_that_cannot_be_served_are_refused(ranks: dict[str, list[Any]]) -> None:
    for found in ranks["misuse"]:
        assert found.keys() == MISUSE.keys()
        for name, text in MISUSE.items():
            assert found[name].startswith("ConfigError: ") and text in found[name], (name, found[name])


def test_other_settings_or_another_model_on_one_rank_are_refused_on_all(ranks: dict[str, list[Any]]) -> None:
    for texts in ranks["different"]:
        for text, (_, told) in zip(texts, DIFFERENT.values(), strict=True):
            assert text.startswith("ProtocolError: ") and f"rank 2 has {told}" in text, text
