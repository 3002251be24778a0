"""What the tests of FSDP2 run on every rank: trainings, checkpoints, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import batch, mlp
from thinwire.hooks import fsdp

Weights = dict[str, torch.Tensor]
CODEC: dict[str, Any] = {"codec": "3lc", "sparsity": 1.5, "measure_link": False}
LOSSLESS: dict[str, Any] = {"codec": "fp32", "measure_link": False}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)


@cache
def mesh(kind: str) -> DeviceMesh:
    """Two sites of two ranks, or four ranks, or three of them; every rank makes every mesh, once."""
    if kind == "hsdp":
        return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    return DeviceMesh("cpu", [0, 1, 2] if kind == "three" else [0, 1, 2, 3])


def sharded(kind: str, seed: int = 0, **options: Any) -> Any:
    """A model of three parameter groups; rows do not divide evenly."""
    model: Any = mlp(seed)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh(kind), **options)
    return fully_shard(model, mesh=mesh(kind), **options)


def train(model: nn.Module, rank: int, steps: int, *, first: int = 0, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(first, first + steps):
        x, y = batch(rank, number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def whole(model: nn.Module) -> Weights:
    """The whole parameters, from this rank's replica."""
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def run(rank: int, kind: str, options: Mapping[str, Any] | None, steps: int = 4, **wrap: Any) -> Weights:
    """Trains with FSDP2, compressed where there are options; returns the weights."""
    model = sharded(kind, **wrap)
    if options is not None:
        fsdp.compress(model, **options)
    train(model, rank, steps)
    return whole(model)


def run_accumulating(rank: int, kind: str, options: Mapping[str, Any] | None) -> tuple[Weights, int]:
    """Two or three backward passes a step, of which only the last is exchanged."""
    model = sharded(kind)
    state = None if options is None else fsdp.compress(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(3):
        optimizer.zero_grad()
        for part in range(3):
            if number < 2:
                model.set_requires_gradient_sync(part == 2)
            else:  # inside the site gradients are reduced each time, between sites at the last
                model.set_requires_gradient_sync(True)
                model.set_requires_all_reduce(part == 2 or kind != "hsdp")
            x, y = batch(rank, 3 * number + part)
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return whole(model), 0 if state is None else state.step


def run_warm_up(rank: int, kind: str) -> tuple[Weights, Weights, float]:
    model = sharded(kind)
    state = fsdp.compress(model, start_step=3, **CODEC)
    train(model, rank, 3)
    early = whole(model)
    train(model, rank, 2, first=3)
    return early, run(rank, kind, None, 3), state.counters()["steps"]


def run_skip(rank: int, kind: str) -> tuple[int, bool, bool, Weights]:
    """Rank 1 has one infinite value in one shard, in one step of three."""
    model = sharded(kind)
    state = fsdp.compress(model, nonfinite="skip", **CODEC)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, rank, 2, optimizer=optimizer)
    before = state.state_dict()["ranks"][str(state.rank)]["residuals"]
    optimizer.zero_grad()
    x, y = batch(rank, 2)

    def spoil(_module: nn.Module, _args: object, out: torch.Tensor) -> None:
        """One row of the first layer's gradient is infinite, and so one shard's alone."""
        out.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([0]), torch.inf))  # type: ignore[no-untyped-call]

    handle = model[0].register_forward_hook(spoil) if rank == 1 else None
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    if handle is not None:
        handle.remove()
    after = state.state_dict()["ranks"][str(state.rank)]["residuals"]
    restored = all(torch.equal(before[name], after[name]) for name in before)
    nan = any(bool(p.grad.to_local().isnan().any()) for p in model.parameters() if isinstance(p.grad, DTensor))
    train(model, rank, 2, first=3, optimizer=optimizer)
    return state.steps_skipped, restored, nan, whole(model)


def run_report(rank: int, kind: str) -> tuple[str, str, dict[str, str]]:
    model = sharded(kind)
    down: dict[str, Any] = {"codec_down": "int8"} if kind == "hsdp" else {}
    state = fsdp.compress(model, "3lc", sparsity=1.5, codecs={"0.*": "bf16"}, last_layer="fp32", **down)
    before = str(fsdp.report(state))
    train(model, rank, 3)
    tensors = state.core.residuals.tensors.values()
    chosen = {tensor.name: f"{tensor.choice.up.id}/{tensor.choice.down.id}" for tensor in tensors}
    text = str(fsdp.report(state))
    state.close()
    return before, text, chosen


def run_saved(rank: int, kind: str, folder: str) -> dict[str, Any]:
    """Trains three steps, saves, and trains three more: through, from torch.save's file and from DCP's folder.

    Then three ranks of another mesh, and all four of the other kind of mesh, take the residuals over.
    """
    results: dict[str, Any] = {}
    model = sharded(kind)
    state = fsdp.compress(model, **CODEC)
    train(model, rank, 3)
    saved = {"model": model.state_dict(), "fsdp": state.state_dict()}
    save(saved, checkpoint_id=f"{folder}/dcp")
    torch.save(saved["fsdp"], Path(folder) / f"rank{rank}.pt")
    kept = {name: p.to_local().clone() for name, p in model.state_dict().items()}
    train(model, rank, 3, first=3)
    results["through"], results["state"] = whole(model), saved["fsdp"]
    dist.barrier()
    for how in ("torch.save", "dcp"):
        model = sharded(kind, seed=1)
        state = fsdp.compress(model, **CODEC)
        into = {"model": model.state_dict(), "fsdp": state.state_dict()}
        load(into, checkpoint_id=f"{folder}/dcp")
        assert all(torch.equal(p.to_local(), kept[name]) for name, p in into["model"].items())
        model.load_state_dict(into["model"])
        own = torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True)
        results[f"said, {how}"] = state.load_state_dict(into["fsdp"] if how == "dcp" else own)
        train(model, rank, 3, first=3)
        results[how] = whole(model)
    states = [torch.load(Path(folder) / f"rank{each}.pt", weights_only=True) for each in range(4)]
    other = sharded("fsdp" if kind == "hsdp" else "hsdp")
    resized = fsdp.compress(other, **CODEC)
    results["said, resized"] = resized.load_state_dict(fsdp.merge(states))
    results["other"] = resized.state_dict()
    blank = {"fsdp": resized.blank_state_dict(4, replicas=2 if kind == "hsdp" else None)}
    load(blank, checkpoint_id=f"{folder}/dcp")
    resized.load_state_dict(blank["fsdp"])
    again = resized.state_dict()["ranks"][str(rank)]["residuals"]
    results["same from dcp"] = all(
        torch.equal(value, again[name]) for name, value in results["other"]["ranks"][str(rank)]["residuals"].items()
    )
    if rank < 3:
        fewer = fsdp.compress(sharded("three"), **CODEC)
        fewer.load_state_dict(fsdp.merge(states))
        results["three"] = fewer.state_dict()
    else:
        results["three"] = None
    return results


class Half(nn.Module):
    """A layer that is used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (nn.Linear(16, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def refusals(rank: int) -> dict[str, str]:
    """What every rank hears of what cannot be."""
    heard = {}

    def hear(name: str, call: Callable[[], object]) -> None:
        try:
            call()
            heard[name] = "nothing"
        except tw.ThinwireError as error:
            heard[name] = f"{type(error).__name__}: {error}"

    hear("unwrapped", lambda: fsdp.compress(mlp()))
    hear("ddp", lambda: fsdp.compress(DistributedDataParallel(mlp())))
    hear("fsdp1", lambda: fsdp.compress(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))))
    hear("codec", lambda: fsdp.compress(sharded("hsdp"), "4lc"))
    hear("option", lambda: fsdp.compress(sharded("hsdp"), "3lc", sparsity=7.0))
    hear("down", lambda: fsdp.compress(sharded("fsdp"), "3lc", codec_down="int8"))
    hear("gather", lambda: fsdp.compress(sharded("hsdp"), "3lc", gather="int8"))
    hear("differs", lambda: fsdp.compress(sharded("hsdp"), "3lc" if rank != 3 else "int8", measure_link=False))
    model = sharded("hsdp")
    fsdp.compress(model, **CODEC)
    hear("twice", lambda: fsdp.compress(model, **CODEC))
    train(model, rank, 1)
    hear("compressed still", lambda: train(model, rank, 1))
    for unused in (False, True):
        half: Any = fully_shard(Half(), mesh=mesh("hsdp"))
        if unused:
            if not hasattr(half, "set_reduce_scatter_unused_params"):  # earlier versions of torch
                continue
            half.set_reduce_scatter_unused_params(True)
        fsdp.compress(half, min_numel=1, **CODEC)
        hear(f"unused, {unused}", lambda half=half: half(torch.ones(2, 16)).sum().backward())  # type: ignore[misc]
    model = sharded("fsdp")
    fsdp.compress(model, **CODEC)
    for parameter in model.parameters():  # as an optimizer that steps in the backward pass
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    hear("optimizer in backward", lambda: train(model, rank, 1))
    cube = DeviceMesh("cpu", [[[0], [1]], [[2], [3]]], mesh_dim_names=("replicate", "shard", "tensor"))
    parallel = mlp()
    for layer in parallel:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            shared = distribute_tensor(parameter.detach(), cube["tensor"], [Replicate()])
            layer.register_parameter(name, nn.Parameter(shared))
    fully_shard(parallel, mesh=cube["replicate", "shard"])
    hear("three dimensions", lambda: fsdp.compress(parallel, **CODEC))
    mixed = mlp()
    fully_shard(mixed[0], mesh=mesh("hsdp"))
    fully_shard(mixed, mesh=mesh("fsdp"))
    hear("two meshes", lambda: fsdp.compress(mixed, **CODEC))
    return heard


def run_gathered(rank: int, codec: str | None) -> tuple[Weights, Weights, float, str]:
    """Returns the exact weights, those that the forward pass used, and bytes sent for each step."""
    model = sharded("fsdp")
    state = fsdp.compress(model, **{**CODEC, "gather": codec})
    train(model, rank, 4)
    sent = state.counters()["wire_bytes"] / 4
    with torch.no_grad():
        model(torch.zeros(1, 16))
        model.unshard()
        model[2].unshard()
        used = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if name[0] in "235"}
        model.reshard()
        model[2].reshard()
    return whole(model), used, sent, str(fsdp.report(state))


def run_nan(rank: int, kind: str) -> str:
    """NaN on one rank ends the training on all."""
    model = sharded(kind)
    fsdp.compress(model, **CODEC)
    x, y = batch(rank, 0)
    try:
        (nn.functional.cross_entropy(model(x), y) * (torch.nan if rank == 2 else 1)).backward()  # type: ignore[no-untyped-call]
    except tw.ThinwireError as error:
        return str(error)
    return "nothing"


KINDS = ("hsdp", "fsdp")
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "refusals": (refusals, (), {}),
    **{f"gathered, {codec}": (run_gathered, (codec,), {}) for codec in (None, "fp32", "int8")},
}
for _kind in KINDS:
    CASES |= {
        f"{_kind}, plain": (run, (_kind, None), {}),
        f"{_kind}, fp32": (run, (_kind, LOSSLESS), {}),
        f"{_kind}, 3lc": (run, (_kind, CODEC), {}),
        f"{_kind}, 3lc, each by itself": (run, (_kind, {**CODEC, "gather_mb": 0}), {}),
        f"{_kind}, accumulating, plain": (run_accumulating, (_kind, None), {}),
        f"{_kind}, accumulating, fp32": (run_accumulating, (_kind, LOSSLESS), {}),
        f"{_kind}, accumulating, 3lc": (run_accumulating, (_kind, CODEC), {}),
        f"{_kind}, warm-up": (run_warm_up, (_kind,), {}),
        f"{_kind}, skip": (run_skip, (_kind,), {}),
        f"{_kind}, report": (run_report, (_kind,), {}),
        f"{_kind}, nan": (run_nan, (_kind,), {}),
    }
    for _name, _policy in (("bf16", BF16), ("bf16, reduced in fp32", BF16_FP32), ("fp16", FP16)):
        for _codec, _options in (("plain", None), ("fp32", LOSSLESS), ("3lc", CODEC)):
            CASES[f"{_kind}, {_name}, {_codec}"] = (run, (_kind, _options, 2), {"mp_policy": _policy})


def run_all(rank: int, folder: str) -> dict[str, Any]:
    results = {}
    mesh("three")
    for kind in KINDS:
        results[f"{kind}, saved"] = run_saved(rank, kind, f"{folder}/{kind}")
    for name, (work, args, options) in CASES.items():
        try:
            results[name] = work(rank, *args, **options)
        except Exception as error:
            raise RuntimeError(f"in the case {name!r}") from error  # what thinwire raises would count as a result
    return results
