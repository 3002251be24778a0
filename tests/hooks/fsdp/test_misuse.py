"""Refusals of `fsdp.compress` and of the next backward pass; NaN in one shard: all ranks skip the step, or raise."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import backward, batch, force, mlp, refusal, residuals_of, run_cases, same
from tests.hooks.fsdp_ranks import CODEC, KINDS, LOSSLESS, gradients, mesh, sharded, sharded_layers, train, whole
from thinwire.hooks import fsdp

UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether this torch can reduce parameters without gradients."""
EXPECTED = {
    "unwrapped": "is sharded; wrap it first",
    "ddp": "use ddp.compress",
    "fsdp1": "from torch.distributed.fsdp import fully_shard",
    "down": "codec_down",
    "gather": "inside a replica",
    "twice": "has a communication hook already",
    "crossed": "order the ranks of all sites alike",
    "unused": "set_reduce_scatter_unused_params(True)",
    "optimizer in backward": "step the optimizer after the backward pass",
    "three dimensions": "a mesh of one dimension",
    "two meshes": "one mesh for all",
    "all-reduce hooked later, hsdp": "set_all_reduce_hook was called after fsdp.compress",
    "all-reduce hooked later, fsdp": "set_all_reduce_hook was called after fsdp.compress",
    "unfrozen, hsdp": "last.bias was frozen when fsdp.compress was called",
    "unfrozen, fsdp": "last.bias was frozen when fsdp.compress was called",
}
"""A part of each ConfigError."""


class Pair(nn.Module):
    """Two parameters of equal size, of which a pass may use the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8, 12)), nn.Parameter(torch.ones(8, 12))

    def forward(self, x: torch.Tensor, *, half: bool = False) -> torch.Tensor:
        return x @ (self.a if half else self.a * self.b).T


def refuse_later_changes(rank: int, kind: str) -> dict[str, str]:
    """Hooks and frozen parameters that change after `compress`."""
    heard = {}
    model = sharded_layers(kind)
    fsdp.compress(model, **LOSSLESS)
    gradients(model, rank, 0)
    model.last.set_all_reduce_hook(lambda _: None)
    heard[f"all-reduce hooked later, {kind}"] = refusal(partial(gradients, model, rank, 1))
    model = sharded_layers(kind)
    model.last.bias.requires_grad_(False)
    fsdp.compress(model, **LOSSLESS)
    model.last.bias.requires_grad_(True)
    heard[f"unfrozen, {kind}"] = refusal(partial(gradients, model, rank, 0))
    return heard


def refuse(rank: int) -> dict[str, str]:
    model = sharded("hsdp")
    fsdp.compress(model, **CODEC)
    calls: dict[str, Any] = {
        "unwrapped": (mlp(), {}),
        "ddp": (DistributedDataParallel(mlp()), {}),
        "fsdp1": (FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")), {}),
        "down": (sharded("fsdp"), {"codec_down": "int8"}),
        "gather": (sharded("hsdp"), {"gather": "int8"}),
        "twice": (model, CODEC),
        "crossed": (sharded_layers("crossed"), {}),
        "differs": (sharded("hsdp"), {"codec": "3lc" if rank != 3 else "int8", "measure_link": False}),
    }
    heard = {name: refusal(partial(fsdp.compress, given, **options)) for name, (given, options) in calls.items()}
    heard["compressed still"] = refusal(partial(train, model, rank, 2))
    for unused in (False, True)[: 1 + UNUSED]:
        half: Any = fully_shard(Pair(), mesh=mesh("hsdp"))
        if unused:
            half.set_reduce_scatter_unused_params(True)
        fsdp.compress(half, min_numel=1, **CODEC)
        heard["unused, reduced" if unused else "unused"] = refusal(partial(gradients, half, rank, 0, half=True))
    model = sharded("fsdp")
    fsdp.compress(model, **CODEC)
    for parameter in model.parameters():  # as an optimizer that steps in the backward pass
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    heard["optimizer in backward"] = refusal(partial(train, model, rank, 1))
    cube = DeviceMesh("cpu", [[[0], [1]], [[2], [3]]], mesh_dim_names=("replicate", "shard", "tensor"))
    parallel = mlp()
    for layer in parallel:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            shared = distribute_tensor(parameter.detach(), cube["tensor"], [Replicate()])
            layer.register_parameter(name, nn.Parameter(shared))
    fully_shard(parallel, mesh=cube["replicate", "shard"])
    heard["three dimensions"] = refusal(partial(fsdp.compress, parallel, **CODEC))
    mixed = mlp()
    fully_shard(mixed[0], mesh=mesh("hsdp"))
    fully_shard(mixed, mesh=mesh("fsdp"))
    heard["two meshes"] = refusal(partial(fsdp.compress, mixed, **CODEC))
    for kind in KINDS:
        heard |= refuse_later_changes(rank, kind)
    return heard


def test_unsupported_models_meshes_options_and_changes_raise_config_error(ranks: dict[str, list[Any]]) -> None:
    for heard in ranks["misuse"]:
        assert "rank 3 has codec" in heard["differs"] and heard["differs"].startswith("ProtocolError")
        assert heard["compressed still"] == "nothing", "after a second compress was refused"
        assert heard.get("unused, reduced", "nothing") == "nothing"
        for name, text in EXPECTED.items():
            assert heard[name].startswith("ConfigError: ") and text in heard[name], (name, heard[name])


Ranks = dict[str, list[Any]]


def run_skip(rank: int, kind: str) -> tuple[int, bool, bool, dict[str, torch.Tensor]]:
    """Rank 1 has one infinite row, which is one shard's, in one step of five."""
    model = sharded(kind)
    state = fsdp.compress(model, nonfinite="skip", **CODEC)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, rank, 2, optimizer=optimizer)
    before = residuals_of(state)
    optimizer.zero_grad()

    def spoil(_module: nn.Module, _args: object, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([0]), torch.inf))  # type: ignore[no-untyped-call]

    handle = model[0].register_forward_hook(spoil) if rank == 1 else None
    backward(model, rank, 2)
    if handle is not None:
        handle.remove()
    restored = same(before, residuals_of(state))
    nan = any(bool(p.grad.to_local().isnan().any()) for p in model.parameters() if isinstance(p.grad, DTensor))
    train(model, rank, 2, first=3, optimizer=optimizer)
    return state.steps_skipped, restored, nan, whole(model)


def run_raise(rank: int, kind: str) -> str:
    """NaN on one rank ends the training on all."""
    model = sharded(kind)
    fsdp.compress(model, **CODEC)
    try:
        backward(model, rank, 0, torch.nan if rank == 2 else 1)
    except tw.ThinwireError as error:
        return str(error)
    return "nothing"


def run_mixed(rank: int) -> list[tuple[str, int, bool]]:
    """Steps with NaN in the rows of one shard, which compresses while the other shard does not, or the reverse."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(16, 64)), mesh=mesh("hsdp"))
    state: Any = fsdp.compress(model, "auto", measure_link=False, nonfinite="skip")
    force(state, 0 if rank % 2 else 3)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(5):
        optimizer.zero_grad()
        y, skipped = model(batch(rank, step)[0]), state.steps_skipped
        first, second = (torch.nan if rank == 0 and step == bad else 1.0 for bad in (2, 3))
        (first * y[:, :32].sum() + second * y[:, 32:].sum()).backward()
        if state.steps_skipped == skipped:
            optimizer.step()
        nan = {bool(parameter.grad.to_local().isnan().all()) for parameter in model.parameters()}
        found.append((state.auto.setting.name, state.steps_skipped, nan == {step in (2, 3)}))
    return found


def run_uncompressed(rank: int, kind: str, nonfinite: Any) -> tuple[list[tuple[int, bool, str]], bool]:
    """Uncompressed steps with NaN in one row of rank 1's gradient, which without replicas is rank 0's shard."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(16, 64, bias=False)), mesh=mesh(kind))
    state: Any = fsdp.compress(model, "auto", measure_link=False, nonfinite=nonfinite)
    force(state, 0)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        optimizer.zero_grad()
        y, skipped, failed = model(batch(rank, step)[0]), state.steps_skipped, ""
        factor = torch.nan if rank == 1 and step == 2 else 1.0
        try:
            (factor * y[:, 0].sum() + y[:, 1:].sum()).backward()
        except tw.ThinwireError as error:
            failed = str(error)
        if state.steps_skipped == skipped and not failed:
            optimizer.step()
        [parameter] = model.parameters()
        seen.append((state.steps_skipped, bool(parameter.grad.to_local().isnan().all()), failed))
        if failed:
            break
    return seen, all(bool(each.isfinite().all()) for each in whole(model).values())


CASES: dict[str, tuple[Any, ...]] = {
    **{f"{kind}, skip": (run_skip, kind) for kind in KINDS},
    **{f"{kind}, raise": (run_raise, kind) for kind in KINDS},
    "mixed": (run_mixed,),
    **{
        f"{kind}, auto, {way}": (run_uncompressed, kind, way) for kind in ("fsdp", "alone") for way in ("skip", "raise")
    },
    "misuse": (refuse,),
}


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run_cases(4, CASES, group_timeout_s=60.0)


def test_inf_in_one_shard_skips_step_on_all_and_keeps_residuals(ranks: Ranks) -> None:
    for kind in KINDS:
        for skipped, restored, nan, trained in ranks[f"{kind}, skip"]:
            assert (skipped, restored, nan) == (1, True, True) and same(trained, ranks[f"{kind}, skip"][0][-1])


def test_nan_on_one_rank_raises_on_all_by_default(ranks: Ranks) -> None:
    for kind in KINDS:
        for text in ranks[f"{kind}, raise"]:
            assert "NaN or Inf" in text or "a rank of another shard failed" in text


def test_nan_skips_compressed_and_uncompressed_shards(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks["mixed"]):
        assert {setting for setting, *_ in found} == {"uncompressed" if rank % 2 else "3lc[s=1]"}
        assert [skipped for _, skipped, _ in found] == [0, 0, 1, 2, 2] and all(fits for *_, fits in found), (
            rank,
            found,
        )


def test_nan_in_uncompressed_step_skips_or_raises_on_all_ranks(ranks: Ranks) -> None:
    for kind in ("fsdp", "alone"):
        for rank in range(4):
            seen, finite = ranks[f"{kind}, auto, skip"][rank]
            assert seen == [(0, False, ""), (0, False, ""), (1, True, ""), (1, False, "")] and finite
            seen, finite = ranks[f"{kind}, auto, raise"][rank]
            assert len(seen) == 3 and seen[2][0] == 0 and finite
            elsewhere = kind == "fsdp" and rank != 0  # whose own shard is finite
            assert ("a rank of another shard failed" if elsewhere else "holds NaN or Inf") in seen[2][2], seen
