"""Situations that users of other tools reported, on two ranks: the right result, or an error that says what to do."""

from __future__ import annotations

import re
import warnings
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
from tests.hooks import situations as loops
from tests.hooks.columns import run_anew, run_apart, run_end, run_refused, run_situation, trained
from tests.hooks.ddp_ranks import refusal, run_cases, run_ranks, same
from tests.hooks.several_optimizers import CODED as OPTIONS
from tests.hooks.several_optimizers import HOOKS, hooked, noise, run_gan, run_sharply, whole
from tests.hooks.situations import COLUMNS, Situation
from thinwire.hooks import ddp, fsdp

# ---- where values lie


def run_placement(rank: int) -> tuple[str, str, bool, str]:
    """A state of shards of rows in a training of shards of columns; one of a transposed parameter."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for dim in (0, 1):
        torch.manual_seed(0)
        model: Any = nn.Linear(32, 64, bias=False)
        fully_shard(model, mesh=mesh, shard_placement_fn=[rows, columns][dim])
        found[dim] = fsdp.compress(model, **{**OPTIONS, "sparsity": 1.9})
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
    again = fsdp.compress(plain, **{**OPTIONS, "sparsity": 1.9})
    again.load_state_dict(fsdp.merge(states))
    whole = still_to_add(state)
    kept = all(torch.allclose(each, whole, rtol=1e-5) for each in (still_to_add(other, 1), still_to_add(again)))
    transposed = fsdp.compress(turned, **OPTIONS)
    return alone, said, kept, refusal(lambda: transposed.load_state_dict(state.state_dict()))


def rows(_: nn.Parameter) -> Shard:
    return Shard(0)


def columns(_: nn.Parameter) -> Shard:
    return Shard(1)


def still_to_add(state: Any, dim: int = 0) -> torch.Tensor:
    """The sum of all ranks' residuals, whole, where tensors are cut along a dimension."""
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
        ddp.compress(model, **OPTIONS)
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


# ---- the table

UNWRAPPED = ("ddp", "group", "server")
"""Columns of models that FSDP2 takes in no way: it copies none, and shards no scalar nor strided parameters."""
LOCAL = ("server, local", "server, sparse", "server, demo")
SITUATIONS = {
    "inference mode": Situation(besides=loops.infer, columns=(*COLUMNS, "server, local", "server, votes")),
    "copies and pickles": Situation(besides=loops.copy_and_pickle, columns=UNWRAPPED),
    "collectives in the backward pass": Situation(besides=loops.meet_in_backward),
    "gradients that are zeroed": Situation(set_to_none=False),
    "rates and momenta of one worker's own": Situation(
        besides=loops.write_own_rate, columns=("server", "server, votes")
    ),
    "odd parameters": Situation(loops.Odd, columns=(*UNWRAPPED, *LOCAL)),
    "bfloat16": Situation(partial(loops.Typed, torch.bfloat16), columns=(*UNWRAPPED, *LOCAL)),
    "float16": Situation(partial(loops.Typed, torch.float16), columns=("ddp", "server")),
    "float64": Situation(partial(loops.Typed, torch.float64), columns=("ddp", "server")),
    "a parameter that is frozen midway": Situation(
        loops.Odd, loops.freeze, columns=("group", "server", "server, local"), unchanged=()
    ),
    "channels last": Situation(loops.Convolved, columns=UNWRAPPED),
    "weights that another module uses": Situation(loops.Borrows, loops.sync, unchanged=HOOKS),
    "weights that a hook computes": Situation(loops.normed, columns=UNWRAPPED),
    "weights that are pruned": Situation(loops.pruned, columns=(*UNWRAPPED, "server, local")),
    "momentum encoder": Situation(loops.Follows, loops.follow, unchanged=()),
    "two passes over one graph": Situation(
        backward=loops.twice, columns=("fsdp", "group", "server, votes"), unchanged=("group",)
    ),
    "two passes, the last exchanges": Situation(backward=loops.twice_apart, columns=("fsdp", "group", "server")),
    "two passes in views": Situation(loops.Viewed, backward=loops.accumulated, columns=UNWRAPPED, unchanged=()),
    "a branch of some batches": Situation(loops.Branched, columns=("ddp",)),
    "checkpointed": Situation(partial(loops.Checkpointed, False)),
    "checkpointed, reentrant": Situation(partial(loops.Checkpointed, True)),
    "autocast": Situation(backward=loops.in_bfloat16, unchanged=()),
    "clipped gradients": Situation(change=loops.clip, columns=HOOKS, unchanged=()),
    "Adam": Situation(optimizer=loops.adam, columns=(*HOOKS, "server", "server, votes"), unchanged=()),
    "AdamW": Situation(optimizer=loops.adamw, columns=("ddp", "server"), unchanged=()),
}
PLACES = [(name, column) for name, situation in SITUATIONS.items() for column in situation.columns]
REFUSED = {
    "complex parameters": (Situation(loops.Complex), "ConfigError: .*complex64", COLUMNS),
    "two passes over one graph": (
        Situation(backward=loops.twice),
        "ProtocolError: .*pushed twice.*no_sync",
        ("server",),
    ),
    "two passes over one wrapper's graph": (
        Situation(backward=loops.twice),
        "nothing .*call backward.. once",
        ("ddp",),
    ),
    "early weights": (Situation(loops.Borrows), "RuntimeError: .*inplace operation", ("server",)),
}
"""Situations, what a worker hears, and where."""
ENDS = {
    ("group", "raises"): "ProtocolError: rank 1 gave up: no disk",
    ("group", "returns"): "ProtocolError: rank 1 gave up: its loop is over",
    ("server", "raises"): "worker 1 went away at step [23]: it failed with OSError: no disk",
    ("server", "returns"): "worker 1 has left before step 3",
    ("server, votes", "returns"): "worker 1 has left before step 3",
}
"""What rank 0 hears where rank 1 is no longer there."""
CASES: dict[str, tuple[Any, ...]] = {
    **{f"gan, {kind}": (run_gan, kind) for kind in HOOKS},
    "placement": (run_placement,),
    "report": (run_report,),
    "wrapped": (run_wrapped,),
    **{f"{name}, {column}": (run_situation, column, SITUATIONS[name]) for name, column in PLACES},
    **{f"{name}, {at}": (run_refused, at, each) for name, (each, _, columns) in REFUSED.items() for at in columns},
    **{f"{column} {how}": (run_end, column, how) for column, how in ENDS},
    "IPv6": (partial(trained, host="[::1]"), "server", Situation(), "3lc"),
    **{f"sharpness, {kind}": (run_sharply, kind) for kind in HOOKS},
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    return run_cases(2, {**CASES, **{f"anew, {column}": (run_anew, column) for column in COLUMNS[:3]}})


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


@pytest.mark.parametrize(("name", "column"), PLACES)
def test_situation_gives_the_right_weights_on_all_ranks(ranks: dict[str, list[Any]], name: str, column: str) -> None:
    for weights, unchanged, apart in ranks[f"{name}, {column}"]:
        assert unchanged and apart < 10 and same(weights, ranks[f"{name}, {column}"][0][0])


@pytest.mark.parametrize("name", REFUSED)
def test_situation_that_cannot_be_is_told(ranks: dict[str, list[Any]], name: str) -> None:
    _, told, columns = REFUSED[name]
    for said in (said for column in columns for said in ranks[f"{name}, {column}"]):
        assert re.match(told, said), said


def test_rank_that_raises_or_returns_early_is_named_to_the_other_at_once(ranks: dict[str, list[Any]]) -> None:
    for (column, how), told in ENDS.items():
        first, second = ranks[f"{column} {how}"]
        assert re.search(told, first) and second == ("OSError: no disk" if how == "raises" else "nothing"), first


@pytest.mark.parametrize("kind", HOOKS)
def test_script_that_ends_early_is_noticed_by_the_other(kind: str) -> None:
    told, _ = run_ranks(2, run_end, kind, "returns")
    assert re.search("rank 1 is gone|by peer", told)


def test_process_group_that_is_made_anew_and_ipv6_change_no_bit(ranks: dict[str, list[Any]]) -> None:
    for column in COLUMNS[:3]:
        for trainings in ranks[f"anew, {column}"]:
            assert all(same(each, ranks[f"gradients that are zeroed, {column}"][0][0]) for each in trainings)
    assert all(same(each, ranks["gradients that are zeroed, server"][0][0]) for each in ranks["IPv6"])


def test_subgroups_and_a_rank_alone_train_as_torch_does() -> None:
    found = run_cases(3, {column: (run_apart, column) for column in ("ddp", "group")})
    for (first, *_), *others in found.values():
        assert same(first, others[1][0]) and not same(first, others[0][0])
    assert all(apart < 10 for each in found.values() for _, apart in each)
