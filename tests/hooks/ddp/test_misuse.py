"""The hooks refuse unsupported models and loops, and ranks that differ; they warn of unused gradients."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import thinwire as tw
from tests.hooks.ddp_ranks import backward, ddp, mlp, refusal, run_cases, same, train, weights
from thinwire.hooks import fsdp

CODEC: dict[str, Any] = {"codec": "3lc", "sparsity": 1.5, "measure_link": False}

DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"codec": "3lc", "sparsity": 1.5}, "codec of 0.weight.sparsity = 1.5 and rank 0 has 1.0"),
    "codec": ({"codec": "int8"}, "codec.id = 'int8' and rank 0 has '3lc'"),
    "start_step": ({"codec": "3lc", "start_step": 4}, "start_step = 4 and rank 0 has 0"),
    "gather_mb": ({"codec": "3lc", "gather_mb": 0}, "gather_mb = 0.0 and rank 0 has 4.0"),
    "nonfinite": ({"codec": "3lc", "nonfinite": "skip"}, "nonfinite = 'skip' and rank 0 has 'raise'"),
    "auto": ({"codec": "auto"}, "codec.id = 'auto' and rank 0 has '3lc'"),
    "names": ({"codec": "3lc"}, ""),
}
"""Settings of rank 2, and the error on all ranks."""
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


def run_other_group(rank: int) -> str:
    """Local updates of two of the three ranks that a wrapper is over: they would train apart from the third."""
    two, model = dist.new_group([0, 1]), DistributedDataParallel(mlp())
    inner = torch.optim.AdamW(model.parameters())
    return refusal(lambda: tw.distribute(model, inner, group=two, design="update")) if rank < 2 else ""


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


@contextmanager
def heard() -> Iterator[list[str]]:
    """The user warnings of a block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


def run_small(rank: int) -> list[str]:
    small = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 100))
    with heard() as told:
        ddp.compress(DistributedDataParallel(small), min_numel=1000, **CODEC)
    return told


class Frozen(nn.Module):
    """A trained layer, a frozen one, and one that each rank keeps to itself on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.own = nn.Linear(16, 4), nn.Linear(16, 16), nn.Linear(16, 16)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.own(self.body(x)))
        return out


def run_unfrozen(rank: int) -> tuple[list[str], list[str]]:
    """Warnings while a layer is frozen, and in the steps after it is not."""
    module, ignored = Frozen(), ["own.weight", "own.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(module)
    with heard() as before:
        state = ddp.compress(model, min_numel=64, **CODEC)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(model, rank, 2, optimizer=optimizer)
    module.body.requires_grad_(True)
    with heard() as after:
        train(model, rank, 2, first=2, optimizer=optimizer)
    state.close()
    return before, after


def run_lbfgs(rank: int, kind: str) -> tuple[str, bool]:
    """The error that LBFGS, which runs several passes a step, gets; and whether the weights stay."""
    net = mlp()
    wrapped: Any = fully_shard(net) if kind == "fsdp" else DistributedDataParallel(net)
    fsdp.compress(net, **CODEC) if kind == "fsdp" else ddp.compress(wrapped, **CODEC)
    before, optimizer = weights(net), torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)

    def closure() -> float:
        wrapped.zero_grad()
        backward(wrapped, 0, 0)
        return 0.0

    return refusal(lambda: optimizer.step(closure)), same(before, weights(net))  # type: ignore[no-untyped-call]


WASTED = ("DDP", "DDP, view", "FSDP")
NOT_WASTED = ("no_sync", "view added", "NaN", "loaded", "FSDP, added")


def run_thrown_away(rank: int, how: str) -> list[str]:
    """Warnings of a loop that leaves a pass unused, as a GAN's generator step does, or that only looks so."""
    net = nn.Sequential(nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 4))
    wrapped: Any = net
    with heard() as told:
        if how.startswith("FSDP"):
            fully_shard(net)
            state: Any = fsdp.compress(net, **CODEC)
        else:
            wrapped = DistributedDataParallel(net, gradient_as_bucket_view="view" in how)
            state = ddp.compress(wrapped, nonfinite="skip", **CODEC)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        for step in range(4):
            nan = how == "NaN" and step == 2
            with wrapped.no_sync() if how == "no_sync" else nullcontext():
                backward(wrapped, rank, step, torch.nan if nan else 1)
            if how == "loaded":
                state.load_state_dict(state.state_dict())
            if how != "NaN":
                if "added" not in how:
                    optimizer.zero_grad()
                backward(wrapped, rank, 9)
            assert state.steps_skipped == (how == "NaN" and step >= 2)
            if not nan:
                optimizer.step()
            optimizer.zero_grad()
        state.close()
    return told


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    wasted = {how: (run_thrown_away, how) for how in (*WASTED, *NOT_WASTED)}
    lbfgs = {f"LBFGS, {kind}": (run_lbfgs, kind) for kind in ("ddp", "fsdp")}
    one: dict[str, tuple[Any, ...]] = {"small": (run_small,), "unfrozen": (run_unfrozen,), "group": (run_other_group,)}
    return run_cases(3, {"misuse": (run_misuse,), "different": (run_different,), **one, **wasted, **lbfgs})


def test_unsupported_models_loops_and_options_raise_config_error(ranks: dict[str, list[Any]]) -> None:
    for found in ranks["misuse"]:
        assert found.keys() == MISUSE.keys()
        for name, text in MISUSE.items():
            assert found[name].startswith("ConfigError: ") and text in found[name], (name, found[name])
    for said, unchanged in ranks["LBFGS, ddp"] + ranks["LBFGS, fsdp"]:
        assert said.startswith("ConfigError: LBFGS") and unchanged


def test_wrapper_over_other_ranks_raises_config_error(ranks: dict[str, list[Any]]) -> None:
    assert all("it is over ranks [0, 1, 2], and group= over [0, 1]" in said for said in ranks["group"][:2]), ranks


def test_different_settings_or_model_on_one_rank_raise_on_all(ranks: dict[str, list[Any]]) -> None:
    for texts in ranks["different"]:
        for text, (_, told) in zip(texts, DIFFERENT.values(), strict=True):
            assert text.startswith("ProtocolError: ") and f"rank 2 has {told}" in text, text


def test_uncompressed_models_and_unfrozen_parameters_warn(
    ranks: dict[str, list[Any]],
) -> None:
    for text in (text for texts in ranks["small"] for text in texts):
        assert "nothing is compressed" in text and "min_numel=1000" in text
    for before, [text] in ranks["unfrozen"]:
        assert before == [] and "(body.weight, body.bias)" in text and "replicas will differ" in text


def test_discarded_gradients_warn_once(ranks: dict[str, list[Any]]) -> None:
    for how in WASTED:
        for [text] in ranks[how]:
            assert re.search("no optimizer took .* `with model.no_sync", text), (how, text)
    assert all(ranks[how] == [[], [], []] for how in NOT_WASTED)
