"""Warnings of the DDP and FSDP2 hooks: nothing compressed, unfrozen parameters, gradients that no optimizer takes."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.hooks.ddp_ranks import backward, batch, ddp, mlp, refusal, run_cases, same, train, weights
from thinwire.hooks import fsdp, guards

CODEC: dict[str, Any] = {"codec": "3lc", "sparsity": 1.5, "measure_link": False}


@contextmanager
def heard() -> Iterator[list[str]]:
    """The user warnings of a block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


class Frozen(nn.Module):
    """A trained layer, a frozen one, and one that each rank keeps to itself on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.own = nn.Linear(16, 4), nn.Linear(16, 16), nn.Linear(16, 16)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.own(self.body(x)))
        return out


def run_compress(rank: int) -> dict[str, list[str]]:
    """Warnings of models of which nothing, or all that was asked for, is compressed."""
    small = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 100))
    with heard() as nothing:
        ddp.compress(DistributedDataParallel(small), min_numel=1000, **CODEC)
    with heard() as asked:
        ddp.compress(DistributedDataParallel(nn.Linear(4, 4)), "fp32", measure_link=False)
        ddp.compress(DistributedDataParallel(nn.Linear(4, 100)), **CODEC)
    return {"small": nothing, "as asked": asked}


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


def lbfgs_step(net: nn.Module, wrapped: Any) -> None:
    def closure() -> float:
        wrapped.zero_grad()
        backward(wrapped, 0, 0)
        return 0.0

    torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2).step(closure)  # type: ignore[no-untyped-call]


def run_lbfgs(rank: int, kind: str) -> str:
    net = mlp()
    wrapped: Any = fully_shard(net) if kind == "fsdp" else DistributedDataParallel(net)
    state: Any = fsdp.compress(net, **CODEC) if kind == "fsdp" else ddp.compress(wrapped, **CODEC)
    if kind == "closed":
        state.close()
    before = weights(net)
    try:
        said = refusal(lambda: lbfgs_step(net, wrapped))
    except RuntimeError as error:
        said = str(error)
    assert same(before, weights(net)), "nothing was changed"
    return said


def run_wrapped_anew(rank: int) -> tuple[int, list[str]]:
    """Unfreezes, and wraps and compresses anew; then two wrappers share a layer, which is frozen in one of them."""
    with heard() as told:
        module = Frozen()
        ddp.compress(DistributedDataParallel(module), min_numel=64, **CODEC)
        module.body.requires_grad_(True)
        gc.collect()
        left = len(guards._watching)
        again = DistributedDataParallel(module)
        ddp.compress(again, min_numel=64, **CODEC)
        module.body.requires_grad_(False)
        other = DistributedDataParallel(nn.Sequential(module.body, nn.Linear(16, 4)))
        ddp.compress(other, min_numel=64, **CODEC)
        module.body.requires_grad_(True)
        train(again, rank, 2, optimizer=torch.optim.SGD(module.parameters(), lr=0.05))
        del again, other
        gc.collect()
        lbfgs_step(module, module)
    return left, told


def test_models_of_which_nothing_is_compressed_and_unfrozen_parameters_are_warned_of() -> None:
    kinds = ("ddp", "fsdp", "closed")
    lbfgs: dict[str, tuple[Any, ...]] = {kind: (run_lbfgs, kind) for kind in kinds}
    anew: dict[str, tuple[Any, ...]] = {"anew": (run_wrapped_anew,)}  # first: it counts watches
    found = run_cases(1, {**anew, "compress": (run_compress,), "unfrozen": (run_unfrozen,), **lbfgs})
    [told], [(before, after)] = found["compress"], found["unfrozen"]
    [text] = told["small"]
    assert "nothing is compressed" in text and "min_numel=1000" in text
    assert told["as asked"] == before == []
    [text] = after
    assert "(body.weight, body.bias)" in text and "replicas will differ" in text
    assert found["anew"] == [(0, [])], "a watch ends with its wrapper and knows what other wrappers average"
    for kind in ("ddp", "fsdp"):
        assert found[kind][0].startswith("ConfigError: LBFGS")
    assert "close() was called" in found["closed"][0], "and it does not hang"


WASTED = ("DDP", "DDP, view", "FSDP")
NOT_WASTED = ("no_sync", "view no_sync", "added", "view added", "NaN", "view NaN", "loaded", "FSDP, added")


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
            with wrapped.no_sync() if "no_sync" in how else nullcontext():
                backward(wrapped, rank, step, torch.nan if "NaN" in how and step == 2 else 1)
            if "loaded" in how:
                state.load_state_dict(state.state_dict())
            if "NaN" not in how:
                if "added" not in how:
                    optimizer.zero_grad()
                backward(wrapped, rank, 9)
            elif step == 2:
                assert state.steps_skipped == 1
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        state.close()
    return told


class Parts(nn.Module):
    """Two layers; a pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 200) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        found: torch.Tensor = self.layers[which](x)
        return found


def run_parts(rank: int) -> list[str]:
    """Two passes through different parts of a model for one step."""
    parts = Parts()
    for layer in parts.layers:
        fully_shard(layer)
    fully_shard(parts)
    with heard() as told:
        state = fsdp.compress(parts, **CODEC)
        optimizer = torch.optim.SGD(parts.parameters(), lr=0.05)
        for step in range(3):
            for which in range(2):
                parts(batch(rank, step)[0], which).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state.close()
    return told


def run_scaled(rank: int) -> list[str]:
    """A step that a scaler skips for a parameter outside the model."""
    net, elsewhere = DistributedDataParallel(nn.Linear(16, 200)), nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    with heard() as told:
        state = ddp.compress(net, nonfinite="skip", scaler=scaler, **CODEC)
        optimizer = torch.optim.SGD([*net.parameters(), elsewhere], lr=0.05)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(net(batch(rank, step)[0]).square().mean() + 1e9 * elsewhere.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() < 2.0**100 and state.steps_skipped == 0
        state.close()
    return told


def test_gradients_that_no_optimizer_takes_are_warned_of_once() -> None:
    cases: dict[str, tuple[Callable[..., Any], *tuple[str, ...]]] = {"parts": (run_parts,), "scaled": (run_scaled,)}
    found = run_cases(2, {**cases, **{how: (run_thrown_away, how) for how in (*WASTED, *NOT_WASTED)}})
    for how in WASTED:
        for [text] in found.pop(how):
            assert re.search("no optimizer took .* `with model.no_sync", text), (how, text)
    assert all(told == [[], []] for told in found.values()), found


def test_wrapper_collected_while_an_optimizer_steps_disturbs_no_hook() -> None:
    """torch goes over its list of hooks while it calls them."""
    collecting = False

    def collect(*_: Any) -> None:
        if collecting:
            gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    parts = [nn.Linear(2, 2) for _ in range(2)]
    wrappers: list[Any] = [nn.Sequential(part) for part in parts]
    for part, wrapper in zip(parts, wrappers, strict=True):
        wrapper.itself = [wrapper]  # garbage that only the collector finds
        guards.StepGuard(part, wrapper=wrapper, reduced=list(part.parameters()), compressed=list(part.parameters()))
    optimizer = torch.optim.SGD(parts[1].parameters(), lr=0.1)
    before = len(guards._watching)
    gc.disable()
    try:
        del wrapper, wrappers[0]
        collecting = True
        optimizer.step()
    finally:
        gc.enable()
        handle.remove()
    assert len(guards._watching) == before - 1
