"""FSDP2 and HSDP with the hook on four ranks: the gradients of stock FSDP2, however scripts wrap and run the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.hooks.ddp_ranks import Weights, run_cases
from tests.hooks.fsdp_ranks import KINDS, LOSSLESS, Break, alike, gradients, mesh, sharded_layers
from thinwire.hooks import fsdp
from thinwire.hooks.fsdp.state import ShardedState

GOES_ON = hasattr(FSDPModule, "reset_iter_state")
"""Whether this torch goes on after a backward pass that broke off."""
STEPS = 3


def run(rank: int, kind: str, how: str = "", codec: str = "fp32", **options: Any) -> tuple[bool, int]:
    """Whether gradients are stock FSDP2's, and how many steps the hook has counted."""
    states: list[fsdp.ShardedState] = []

    def make(compressed: bool) -> Any:
        early = how == "before the root"
        model = sharded_layers(kind, root=how not in ("several roots", "before the root"), **options)
        if compressed:
            gather: dict[str, Any] = {"gather": "fp32"} if how == "resharded" else {}
            given = model.second if how == "part" else model
            states.append(fsdp.compress(given, codec, measure_link=False, **gather))
        return fully_shard(model, mesh=mesh(kind)) if early else model

    return alike(rank, make, STEPS, recomputes=how == "recomputed"), states[0].step


def run_resharded(rank: int) -> tuple[bool, int]:
    return run(rank, "fsdp", "resharded", reshard_after_forward=2)


def run_padding_alone(rank: int, codec: str) -> tuple[bool, int]:
    """Two rows over four shards, and nothing else is trained."""
    return run(rank, "wide", "padding", codec, frozen=True, outputs=2)


def run_broken_off(rank: int, kind: str, compressed: bool) -> list[Weights]:
    """The gradients of four steps, of which the second breaks off."""
    model = sharded_layers(kind)
    if compressed:
        fsdp.compress(model, **LOSSLESS)
    found: list[Weights] = []
    for step in range(4):
        Break.on = step == 1
        try:
            found.append(gradients(model, rank, step, to_none=False))
        except ValueError:
            model.reset_iter_state()
    Break.on = False
    return found


def run_groups(rank: int) -> list[int]:
    """How many process groups there are after each model: torch keeps every group, with its threads and sockets."""
    counts = []
    for _ in range(3):
        model = sharded_layers("alone")
        state = fsdp.compress(model, "3lc", measure_link=False)
        gradients(model, rank, 0)
        assert state.step == 1
        state.close()
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
    return counts


HOWS = ("recomputed", "several roots", "part", "before the root")
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{kind}, {how}": (run, kind, how) for kind in KINDS for how in HOWS},
    "descending": (run, "descending"),
    "descending sites": (run, "descending sites"),
    "resharded": (run_resharded,),
    "padding, fp32": (run_padding_alone, "fp32"),
    "padding, auto": (run_padding_alone, "auto"),
}
BROKEN = {f"{kind}, {on}": (run_broken_off, kind, on) for kind in KINDS for on in (False, True)} if GOES_ON else {}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    more: dict[str, tuple[Any, ...]] = {"groups": (run_groups,), **BROKEN}
    return run_cases(4, {**CASES, **more}, group_timeout_s=60.0)


def test_gradients_and_steps_are_stock_fsdp2_s(ranks: dict[str, list[Any]]) -> None:
    """One step for each backward pass; shards go by ranks, and a rank whose shards are empty takes part."""
    for case in CASES:
        assert ranks[case] == [(True, STEPS)] * 4, case


@pytest.mark.skipif(not GOES_ON, reason="this torch cannot go on after such a pass")
def test_gradients_of_a_pass_that_broke_off_are_discarded(ranks: dict[str, list[Any]]) -> None:
    for kind in KINDS:
        for plain, ours in zip(ranks[f"{kind}, False"], ranks[f"{kind}, True"], strict=True):
            assert len(plain) == 3
            for wanted, found in zip(plain, ours, strict=True):
                assert all(torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-7) for name in wanted)
                assert wanted.keys() == found.keys()


def test_models_of_one_mesh_share_a_process_group(ranks: dict[str, list[Any]]) -> None:
    assert all(counts == 3 * [counts[0]] for counts in ranks["groups"])


def run_alone(rank: int, shape: tuple[int, ...]) -> int:
    """Five backward passes of one rank, of which torch reduces nothing, two of them accumulating; then two at once."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    made = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model[0], mesh=made)
    fully_shard(model, mesh=made)
    state = fsdp.compress(model, "3lc", measure_link=False)
    for number in range(5):
        model.set_requires_gradient_sync(number not in (1, 2))  # type: ignore[operator]
        model(torch.randn(4, 16)).sum().backward()
        with torch.no_grad():
            model(torch.randn(4, 16))
    for loss in [model(torch.randn(4, 16)).sum() for _ in range(2)]:
        loss.backward()
    return state.step


def test_one_rank_alone_counts_its_steps() -> None:
    """A loop over `state.step` ends also where an elastic job has shrunk to one rank."""
    assert run_cases(1, {"flat": (run_alone, (1,)), "sites": (run_alone, (1, 1))}) == {"flat": [5], "sites": [5]}


class Exchanged(Exception):
    pass


def test_newest_gradients_leave_after_fsdp_s_reductions() -> None:
    """On a GPU a loss scale has changed residuals on FSDP's stream, and the hook's threads read them on another."""
    calls: list[str] = []

    def exchange(*, last: bool) -> None:
        assert last
        raise Exchanged

    groups = [SimpleNamespace(wait_reduced=lambda n=n: calls.append(f"reduced {n}"), device="cpu") for n in range(2)]
    ready = [SimpleNamespace(group=group, wait=lambda: None) for group in groups]
    state: Any = SimpleNamespace(
        _ready=ready,
        _pass=-1,
        _exchanging=False,
        _worst=lambda own, device: calls.append(f"{own.name} on {device}"),
        core=SimpleNamespace(steps_skipped=0),
        _exchange_newest=exchange,
    )
    with pytest.raises(Exchanged):
        ShardedState.end_step(state)
    assert calls == ["reduced 0", "reduced 1", "FAILED on cpu"], "ranks of other shards wait to hear of it"
