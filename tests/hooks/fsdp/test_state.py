"""Checkpoints of the FSDP2 hook: resumed bit for bit, loaded on other meshes, and refused if they do not match."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import thinwire as tw
from tests.hooks.ddp_ranks import ddp, force, mlp, refusal, residuals_of, run_cases, same
from tests.hooks.fsdp_ranks import CODEC, KINDS, LOSSLESS, gradients, mesh, sharded, sharded_layers, train, whole
from thinwire.collective.cut import Cut, whole_outstanding
from thinwire.collective.trained import TrainedTensor
from thinwire.hooks import fsdp
from thinwire.policies.compression import PLAIN, ByShape, select


def run_saved(rank: int, kind: str, folder: str) -> dict[str, Any]:
    """Trains three steps, saves, and trains three more: through, from torch.save's file and from DCP's folder.

    Then three ranks of another mesh, and all four of the other kind of mesh, take the residuals over.
    """
    folder = f"{folder}/{kind}"
    results: dict[str, Any] = {}
    mesh("three")
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
    resized = fsdp.compress(sharded("fsdp" if kind == "hsdp" else "hsdp"), **CODEC)
    results["said, resized"] = resized.load_state_dict(fsdp.merge(states))
    results["other"] = resized.state_dict()
    before = residuals_of(resized)
    blank = {"fsdp": resized.blank_state_dict(4, replicas=2 if kind == "hsdp" else None)}
    load(blank, checkpoint_id=f"{folder}/dcp")
    resized.load_state_dict(blank["fsdp"])
    results["same from dcp"] = same(before, residuals_of(resized))
    if rank < 3:
        fewer = fsdp.compress(sharded("three"), **CODEC)
        fewer.load_state_dict(fsdp.merge(states))
        results["three"] = fewer.state_dict()
    return results


def run_told_apart(rank: int) -> dict[str, Any]:
    both = fsdp.compress(sharded_layers("hsdp"), **LOSSLESS)
    own = both.state_dict()
    moved = sharded_layers("fsdp")
    fsdp.compress(moved, **LOSSLESS)
    return {
        "of DDP": refusal(lambda: both.load_state_dict({key: own[key] for key in own if key != "replicas"})),
        "damaged": refusal(lambda: both.load_state_dict({**own, "ranks": {}, "step": 3})),
        "moved": next(moved.double().parameters()).dtype,
    }


def run_all_ranks(rank: int, kind: str) -> tuple[list[str], str, dict[str, Any], dict[str, Any]]:
    """The ranks that `ddp.AllRanks` brings to rank 0, and each rank's part before and after."""
    model = sharded_layers(kind)
    state, again = (fsdp.compress(each, "auto", measure_link=False) for each in (model, sharded_layers(kind)))
    force(state, 3)
    for step in range(2):
        gradients(model, rank, step)
    whole = ddp.AllRanks(state).state_dict()
    told: list[Any] = [whole]
    dist.broadcast_object_list(told)
    said = ddp.AllRanks(again).load_state_dict(told[0])
    parts = (each.state_dict()["ranks"][str(rank)] for each in (state, again))
    return list(whole["ranks"]), said, *parts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("states")
    cases: dict[str, tuple[Any, ...]] = {"told apart": (run_told_apart,)}
    for kind in KINDS:
        (folder / kind).mkdir()
        cases |= {f"{kind}, saved": (run_saved, kind, str(folder)), f"{kind}, all ranks": (run_all_ranks, kind)}
    return run_cases(4, cases, group_timeout_s=60.0)


def still_to_send(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The sum of all ranks' residuals as the averaged gradient will get it, by name."""
    merged = fsdp.merge(states)
    replicas = merged["replicas"] or None
    shapes = {name: tuple(p.shape) for name, p in mlp().named_parameters()}
    codec = tw.codec("3lc", sparsity=1.5)
    choices = select(shapes, ByShape(up=codec, down=codec if replicas else PLAIN))
    tensors = [TrainedTensor(name, math.prod(shape), torch.float32, choices[name]) for name, shape in shapes.items()]
    ranks = [merged["ranks"][str(rank)] for rank in range(merged["world_size"])]
    return whole_outstanding(tensors, {name: Cut(shape, 0) for name, shape in shapes.items()}, ranks, replicas=replicas)


def test_resume_is_bit_exact_and_other_meshes_keep_residual_sums(ranks: dict[str, list[Any]]) -> None:
    for kind in KINDS:
        results = ranks[f"{kind}, saved"]
        for each in results:
            for how in ("torch.save", "dcp"):
                assert same(each[how], each["through"]) and "bit for bit" in each[f"said, {how}"], how
            assert "residuals were summed over the old ranks" in each["said, resized"] and each["same from dcp"]
        before = still_to_send([each["state"] for each in results])
        assert set(before) == {"0.weight", "2.weight", "5.weight"} and all(value.any() for value in before.values())
        for states in ([each["other"] for each in results], [each["three"] for each in results[:3]]):
            after = still_to_send(states)
            for name, value in before.items():
                assert abs(after[name] - value).max() <= 2**-23 * abs(value).max(), name


def test_states_of_ddp_or_without_ranks_raise_config_error(ranks: dict[str, list[Any]]) -> None:
    for found in ranks["told apart"]:
        assert "of a model under DDP, and this one is under FSDP" in found["of DDP"]
        assert "every rank has its own residuals" in found["damaged"]
        assert found["moved"] == torch.float64, "a hook does not keep a model from another dtype"


def test_all_ranks_gathers_and_restores_shards_and_controllers(ranks: dict[str, list[Any]]) -> None:
    for kind in KINDS:
        for rank, (brought, said, own, again) in enumerate(ranks[f"{kind}, all ranks"]):
            assert brought == ([str(rank)] if rank else ["0", "1", "2", "3"])
            assert "bit for bit" in said and own["auto"] == again["auto"] and '"level":3' in own["auto"]
            assert any(residual.any() for residual in own["residuals"].values())
            assert same(own["residuals"], again["residuals"])
