"""What scripts do around the hook: compile, wrap, unfreeze, choose an optimizer; and what they are told."""

from __future__ import annotations

import gc
import re
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import thinwire as tw
from tests.hooks.ddp_ranks import batch, ddp, mlp, run_ranks, train, weights
from thinwire.hooks import fsdp, guards

CODEC: dict[str, Any] = {"codec": "3lc", "sparsity": 1.5, "measure_link": False}
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias", "5.weight", "5.bias"]


def run_compiled(rank: int) -> dict[str, Any]:
    """Trains plain DDP, compiled DDP, and DDP of a compiled model, which goes on from the residuals of the first."""
    results: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    for how in ("plain", "outside", "inside"):
        inner: Any = mlp()
        inner = torch.compile(inner, backend="eager") if how == "inside" else inner
        wrapped = DistributedDataParallel(inner)
        model: Any = torch.compile(wrapped, backend="eager") if how == "outside" else wrapped
        state = ddp.compress(model, **CODEC)
        train(model, rank, 3)
        saved = saved or state.state_dict()
        state.load_state_dict(saved)
        results[how] = [value for _, value in sorted(weights(wrapped.module).items())]
        results[f"{how}, names"] = list(state.core.residuals.tensors)
    return results


def test_compiled_inside_and_outside_of_ddp() -> None:
    ranks = run_ranks(2, run_compiled)
    for results in ranks:
        for how in ("plain", "outside", "inside"):
            assert results[f"{how}, names"] == NAMES, how
            for ours, plain, first in zip(results[how], results["plain"], ranks[0][how], strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
                assert torch.equal(ours, first), "replicas are equal"


class Frozen(nn.Module):
    """A trained layer, a frozen one, and one that each rank keeps to itself on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.own = nn.Linear(16, 4), nn.Linear(16, 16), nn.Linear(16, 16)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.own(self.body(x)))
        return out


def run_told(rank: int) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")

        def keep(name: str) -> None:
            told[name] = [str(each.message) for each in heard if issubclass(each.category, UserWarning)]
            heard.clear()

        small = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 100))
        ddp.compress(DistributedDataParallel(small), min_numel=1000, **CODEC)
        keep("small")
        ddp.compress(DistributedDataParallel(nn.Linear(4, 4)), "fp32", measure_link=False)
        ddp.compress(DistributedDataParallel(nn.Linear(4, 100)), **CODEC)
        keep("as asked")

        module = Frozen()
        ignored = ["own.weight", "own.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
        model = DistributedDataParallel(module)
        state = ddp.compress(model, min_numel=64, **CODEC)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(model, rank, 2, optimizer=optimizer)
        keep("frozen")
        module.body.requires_grad_(True)
        train(model, rank, 2, first=2, optimizer=optimizer)
        keep("unfrozen")
        state.close()

        for name in ("ddp", "fsdp", "closed"):
            net = mlp()
            wrapped: Any = fully_shard(net) if name == "fsdp" else DistributedDataParallel(net)
            guarded = fsdp.compress(net, **CODEC) if name == "fsdp" else ddp.compress(wrapped, **CODEC)
            if name == "closed":
                guarded.close()
            before = [parameter.detach().clone() for parameter in net.parameters()]
            try:
                lbfgs = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
                lbfgs.step(partial(nn_loss, wrapped, rank))  # type: ignore[no-untyped-call]
            except (tw.ConfigError, RuntimeError) as error:
                told[f"LBFGS, {name}"] = [f"{type(error).__name__}: {error}"]
            same = all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
            assert same, name
    return told


def run_wrapped_anew(rank: int) -> tuple[int, list[str]]:
    """Unfreezes, and wraps and compresses anew; then two wrappers share a layer, which is frozen in one of them."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
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
        shared = [str(each.message) for each in heard]
        heard.clear()
        del again, other
        gc.collect()
        torch.optim.LBFGS(module.parameters(), max_iter=1).step(partial(nn_loss, module, 0))  # type: ignore[no-untyped-call]
    return left, shared


def test_a_watch_ends_with_its_wrapper_and_counts_what_other_wrappers_average() -> None:
    assert run_ranks(1, run_wrapped_anew) == [(0, [])]


def nn_loss(model: nn.Module, rank: int) -> float:
    x, y = batch(rank, 0)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss)


WASTED = ("DDP", "DDP, view", "FSDP")
NOT_WASTED = ("no_sync", "view no_sync", "added", "view added", "NaN", "view NaN", "loaded", "FSDP, added")


def run_thrown_away(rank: int) -> dict[str, list[str]]:
    """Loops that leave a pass unused, and loops that only look so."""
    told: dict[str, list[str]] = {}

    def loop(how: str) -> None:
        net = nn.Sequential(nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 4))
        wrapped: Any = net
        if how.startswith("FSDP"):
            fully_shard(net)
            state: Any = fsdp.compress(net, **CODEC)
        else:
            wrapped = DistributedDataParallel(net, gradient_as_bucket_view="view" in how)
            state = ddp.compress(wrapped, nonfinite="skip", **CODEC)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        for step in range(4):
            with wrapped.no_sync() if "no_sync" in how else nullcontext():
                loss = nn.functional.cross_entropy(wrapped(batch(rank, step)[0]), batch(rank, step)[1])
                (loss * (torch.nan if "NaN" in how and step == 2 else 1)).backward()  # type: ignore[no-untyped-call]
            if "loaded" in how:
                state.load_state_dict(state.state_dict())
            if "added" not in how and "NaN" not in how:
                optimizer.zero_grad()
            if "NaN" not in how:
                nn.functional.cross_entropy(wrapped(batch(rank, 9)[0]), batch(rank, 9)[1]).backward()  # type: ignore[no-untyped-call]
            elif step == 2:
                assert state.steps_skipped == 1
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        state.close()

    for how in (*WASTED, *NOT_WASTED):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            loop(how)
        told[how] = [str(each.message) for each in heard if issubclass(each.category, UserWarning)]
    return told


def test_gradients_that_nobody_takes_are_told_of_once() -> None:
    """As of a GAN's discriminator in its generator's step: plain DDP forgets them, and residuals keep a part."""
    for told in run_ranks(2, run_thrown_away):
        for how in WASTED:
            [text] = told.pop(how)
            assert re.search("exchanged gradients that no optimizer took .* `with model.no_sync", text), (how, text)
        assert not any(told.values()), told


class Parts(nn.Module):
    """Two layers, of which a pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 200) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        found: torch.Tensor = self.layers[which](x)
        return found


def run_that_looks_thrown_away(rank: int) -> list[str]:
    """Two passes through different parts of a model for one step, and a step that a scaler skips for others' sake."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        parts = Parts()
        for layer in parts.layers:
            fully_shard(layer)
        fully_shard(parts)
        sharded = fsdp.compress(parts, **CODEC)
        optimizer: Any = torch.optim.SGD(parts.parameters(), lr=0.05)
        for step in range(3):
            for which in range(2):
                parts(batch(rank, step)[0], which).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sharded.close()
        net, elsewhere = DistributedDataParallel(nn.Linear(16, 200)), nn.Parameter(torch.ones(1))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
        state = ddp.compress(net, nonfinite="skip", scaler=scaler, **CODEC)
        optimizer = torch.optim.SGD([*net.parameters(), elsewhere], lr=0.05)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(net(batch(rank, step)[0]).square().mean() + 1e9 * elsewhere.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() < 2.0**100 and state.steps_skipped == 0
        state.close()
    return [str(each.message) for each in heard if issubclass(each.category, UserWarning)]


def run_joined(rank: int) -> tuple[list[str], list[int]]:
    """Epochs with more batches on one rank: the other takes part in steps that are none of its own."""
    ways: tuple[dict[str, Any], ...] = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True})
    steps = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for options in ways:
            model = DistributedDataParallel(mlp(), **options)
            state = ddp.compress(model, **CODEC)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _ in range(2):
                with model.join():
                    train(model, rank, 3 + 2 * rank, optimizer=optimizer)
            steps.append(state.step)
            state.close()
    return [str(each.message) for each in heard if issubclass(each.category, UserWarning)], steps


def test_a_rank_that_has_run_out_of_data_is_not_told_of_the_others_gradients() -> None:
    assert run_ranks(2, run_joined) == [([], [10, 10, 10])] * 2


def test_gradients_that_a_later_step_takes_or_a_scaler_skips_are_not_told_of() -> None:
    assert run_ranks(2, run_that_looks_thrown_away) == [[], []]


def test_scripts_are_told_what_would_ruin_the_training() -> None:
    for told in run_ranks(1, run_told):
        [text] = told["small"]
        assert re.search("nothing is compressed: all 6 tensors .* 2 of them .* min_numel=1000 values", text), text
        assert told["as asked"] == told["frozen"] == []
        [text] = told["unfrozen"]
        assert re.search(r"2 parameters were frozen .* \(body.weight, body.bias\): .* replicas will differ", text), text
        for name in ("ddp", "fsdp"):
            [text] = told[f"LBFGS, {name}"]
            assert re.match("ConfigError: LBFGS takes several gradients a step", text), text
        [text] = told["LBFGS, closed"]
        assert "close() was called on this state" in text, "and not of LBFGS, and it does not hang"


def test_a_wrapper_that_becomes_garbage_while_an_optimizer_steps_disturbs_nobody() -> None:
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
