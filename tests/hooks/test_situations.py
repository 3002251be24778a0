"""Situations that users of other tools reported, on two ranks: the right result, or an error that says what to do."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import Weights, refusal, run_cases, same
from tests.hooks.several_optimizers import CODED, HOOKS, hooked, noise, run_gan, run_sharply, whole
from thinwire.hooks import ddp, fsdp

# ---- where values lie


def run_placement(rank: int) -> tuple[str, str, bool, str]:
    """A state of shards of rows in a training of shards of columns; one of a transposed parameter."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for dim in (0, 1):
        torch.manual_seed(0)
        model: Any = nn.Linear(32, 64, bias=False)
        fully_shard(model, mesh=mesh, shard_placement_fn=[rows, columns][dim])
        found[dim] = fsdp.compress(model, **{**CODED, "sparsity": 1.9})
        for step in range(3):
            model(noise(rank, step, 8, 32)).pow(2).mean().backward()
    state, other = found.values()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, state.state_dict())
    alone = refusal(lambda: other.load_state_dict(states[rank]))
    said = other.load_state_dict(fsdp.merge(states))
    mixed = {**states[0], "ranks": {"0": states[0]["ranks"]["0"], "1": other.state_dict()["ranks"].get("1")}}
    if rank == 1:
        assert "rank 1 held 'weight' in another layout" in refusal(lambda: other.load_state_dict(mixed))
    dist.all_gather_object(states, other.state_dict())
    plain, turned = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
    for each in (plain, turned):
        fully_shard(each, mesh=mesh)
    again = fsdp.compress(plain, **{**CODED, "sparsity": 1.9})
    again.load_state_dict(fsdp.merge(states))
    whole = still_to_add(state)
    kept = all(torch.allclose(each, whole, rtol=1e-5) for each in (still_to_add(other, 1), still_to_add(again)))
    transposed = fsdp.compress(turned, **CODED)
    return alone, said, kept, refusal(lambda: transposed.load_state_dict(state.state_dict()))


def rows(_: nn.Parameter) -> Shard:
    return Shard(0)


def columns(_: nn.Parameter) -> Shard:
    return Shard(1)


def still_to_add(state: Any, dim: int = 0) -> torch.Tensor:
    """What all ranks have still to add to the averaged gradient, whole, where tensors are cut along a dimension."""
    total: torch.Tensor = state.core.residuals.state_dict()["residuals"]["weight"].clone()
    dist.all_reduce(total)
    shape = (32, 32) if dim == 0 else (64, 16)
    return torch.cat([shard.view(shape) for shard in total.chunk(2)], dim)


# ---- reports


def run_report(rank: int) -> list[str]:
    """Reports of `auto` on a fast link and on one that it believes to be thin, with a record of every second step."""
    said = []
    for kind, link_bps in (("ddp", 1e12), ("ddp", 1e6), ("fsdp", 1e6)):
        model, state = hooked(kind, nn.Linear(64, 64), codec="auto", sparsity=None)
        state.record_to(every=2)
        state.auto.measure = partial(state.auto.controller.take_link, link_bps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(40):
            model(noise(rank, step, 8, 64)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        said.append(str(ddp.report(state)))
    return said


# ---- what wraps a model


class Fabric(nn.Module):
    """Stands in for the wrapper that Lightning's Fabric returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._forward_module(x)
        return found


def run_wrapped(rank: int) -> tuple[bool, str]:
    """A model in Fabric's wrapper trains as its DDP does; a bare ScriptModule is refused."""
    found = []
    for outside in (Fabric, lambda module: module):
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(nn.Linear(8, 32))
        model, optimizer = outside(wrapped), torch.optim.SGD(wrapped.parameters(), lr=0.1)
        ddp.compress(model, **CODED)
        for step in range(3):
            model(noise(rank, step, 4, 8)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(wrapped.module))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Linear(8, 32))
    optimizer = torch.optim.SGD(scripted.parameters(), lr=0.1)
    return same(*found), refusal(lambda: tw.distribute(scripted, optimizer, group=dist.group.WORLD, design="3lc"))


# ---- what a loop does besides, and which parameters it trains


class Odd(nn.Module):
    """Parameters without values, with one, and with columns that lie together; one that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.randn(6, 8).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x)) * self.scale @ self.turned
        return out.sum() + self.empty.sum()


class Plain(nn.Sequential):
    """Two layers, and the loss of what they make."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x.pow(2).mean()


def infer(model: Any, net: nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode():
        model(x)


def copy_and_pickle(model: Any, net: nn.Module, x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing of the hook's state is kept
        for each in (copy.deepcopy(net), copy.deepcopy(model), pickle.loads(pickle.dumps(net))):
            assert each(x).isfinite()


def average_weights(model: Any, net: nn.Module, x: torch.Tensor) -> None:
    averaged = copy.deepcopy(net)
    for mine, own in zip(averaged.parameters(), net.parameters(), strict=True):
        mine.data.lerp_(own.data, 0.01)


def meet_in_backward(model: Any, net: nn.Module, x: torch.Tensor) -> None:
    """The next backward pass has a collective of the script's own."""
    [parameter, *_] = net.parameters()

    def meet(gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.ones(1))
        handle.remove()
        return gradient

    handle = parameter.register_hook(meet)  # type: ignore[no-untyped-call]


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[..., None] | None, tuple[str, ...]]] = {
    "inference mode": (Plain, infer, (*HOOKS, "group")),
    "copies and pickles": (Plain, copy_and_pickle, ("ddp", "group")),
    "momentum encoder": (Plain, average_weights, ("ddp", "group")),
    "collectives in the backward pass": (Plain, meet_in_backward, HOOKS),
    "odd parameters": (Odd, None, ("ddp", "group")),
}
"""By name: the model, what happens after each step, and the modes."""


def run_loop(rank: int, name: str, mode: str) -> tuple[Weights, bool]:
    """The weights after eight steps, and whether they are those of a training in which nothing else happens."""
    make, happens, _ = LOOPS[name]
    found = []
    for besides in (None, happens):
        net = make()
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        if mode == "group":
            optimizer = tw.distribute(net, optimizer, group=dist.group.WORLD, design="local-sgd[h=2]")
            model: Any = net
        else:
            model, optimizer = hooked(mode, net)[0], torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(getattr(optimizer, "inner", optimizer), 0.02, total_steps=8)
        for step in range(8):
            x = noise(rank, step, 4, 8)
            torch.autograd.backward(model(x))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if besides is not None:
                besides(model, net, x)
        if mode == "group":
            optimizer.flush()
            optimizer.close()
        found.append(whole(net))
    return found[1], same(*found)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))


def run_refused(rank: int) -> list[str]:
    """Complex parameters, by every mode."""
    model = Complex()
    return [
        refusal(lambda: hooked("ddp", Complex())),
        refusal(lambda: tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), group=dist.group.WORLD)),
    ]


def run_anew(rank: int, folder: str) -> Weights:
    """The process group is destroyed and made anew; the last case, as the others' is gone."""
    for number in range(2):
        model, state = hooked("ddp", net := Plain())
        torch.autograd.backward(model(noise(rank, number, 4, 8)))
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        state.close()
        del model, state
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=2)
    return whole(net)


CASES: dict[str, tuple[Any, ...]] = {
    **{f"gan, {kind}": (run_gan, kind) for kind in HOOKS},
    "placement": (run_placement,),
    "report": (run_report,),
    "wrapped": (run_wrapped,),
    "refused": (run_refused,),
    **{f"{name}, {mode}": (run_loop, name, mode) for name, (_, _, modes) in LOOPS.items() for mode in modes},
    **{f"sharpness, {kind}": (run_sharply, kind) for kind in HOOKS},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_cases(2, {**CASES, "anew": (run_anew, str(tmp_path_factory.mktemp("groups")))})


@pytest.mark.parametrize("kind", HOOKS)
def test_gradients_that_another_optimizer_s_pass_leaves_are_taken_back(ranks: dict[str, list[Any]], kind: str) -> None:
    for weights, exact, zeroed in ranks[f"gan, {kind}"]:
        assert same(weights, ranks[f"gan, {kind}"][0][0]) and exact and zeroed


@pytest.mark.parametrize("kind", HOOKS)
def test_gradients_that_a_step_computes_anew_replace_those_before_it(ranks: dict[str, list[Any]], kind: str) -> None:
    for weights, exact in ranks[f"sharpness, {kind}"]:
        assert same(weights, ranks[f"sharpness, {kind}"][0][0]) and exact


def test_states_of_other_placements_are_put_together_by_whole_tensors(ranks: dict[str, list[Any]]) -> None:
    for alone, said, kept, turned in ranks["placement"]:
        assert "cut along other dimensions" in alone and "other owners of slices" in said and kept
        assert "in the shape [64, 32" in turned and "here it is [32, 64]" in turned


def test_report_of_auto_says_what_its_setting_says(ranks: dict[str, list[Any]]) -> None:
    for fast, *thin in ranks["report"]:
        assert "none of them compressed: the link (1000 Gbit/s) is fast enough, and nothing" in fast, fast
        for said in thin:
            assert "  verdict          compression pays: auto expects" in said and "would be faster" not in said, said
            assert "  recorded         20 of 40 steps" in said, said


def test_wrappers_are_seen_through_and_script_modules_refused(ranks: dict[str, list[Any]]) -> None:
    for alike, said in ranks["wrapped"]:
        assert alike and "wrap it in DistributedDataParallel before tw.distribute" in said


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, (_, _, modes) in LOOPS.items() for mode in modes])
def test_what_else_a_loop_does_changes_no_bit(ranks: dict[str, list[Any]], name: str, mode: str) -> None:
    for weights, unchanged in ranks[f"{name}, {mode}"]:
        assert unchanged and same(weights, ranks[f"{name}, {mode}"][0][0])


def test_complex_parameters_are_refused(ranks: dict[str, list[Any]]) -> None:
    for said in (said for each in ranks["refused"] for said in each):
        assert said.startswith("ConfigError: ") and "complex64" in said, said


def test_process_group_that_is_made_anew_trains(ranks: dict[str, list[Any]]) -> None:
    assert same(*ranks["anew"])
