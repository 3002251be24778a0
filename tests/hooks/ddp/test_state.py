"""Checkpoints of the DDP hook: resumed bit for bit, on other numbers of ranks, and refused if they do not match."""

from __future__ import annotations

import copy
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import (
    Weights,
    backward,
    ddp,
    mlp,
    refusal,
    residuals_of,
    run_cases,
    run_ranks,
    same,
    train,
    weights,
)

CODEC: dict[str, Any] = {"codec": "3lc", "sparsity": 1.75, "measure_link": False}
CODECS: dict[str, dict[str, Any]] = {"auto": {"codec": "auto"}, "3lc": {"codec": "3lc"}, "lag": {**CODEC, "lag": 5}}
Ranks = dict[str, list[Any]]


def made(**options: Any) -> tuple[DistributedDataParallel, ddp.ThinwireState, torch.optim.Optimizer]:
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, **{"measure_link": False, **options} if "codec" in options else {**CODEC, **options})
    return model, state, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def run_first_half(rank: int, folder: str) -> tuple[Weights, dict[str, Any]]:
    """Trains four steps, saves, trains four more; returns the last weights and the saved state of the hook."""
    model, state, optimizer = made()
    train(model, rank, 4, optimizer=optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ddp": state.state_dict()}
    torch.save(saved, Path(folder) / f"rank{rank}.pt")
    save(saved, checkpoint_id=f"{folder}/dcp")
    train(model, rank, 4, first=4, optimizer=optimizer)
    return weights(model.module), saved["ddp"]


def run_second_half(rank: int, folder: str) -> list[tuple[Weights, str]]:
    """Resumes from either checkpoint."""
    results = []
    for how in ("torch.save", "dcp"):
        model, state, optimizer = made()
        if how == "torch.save":
            saved = torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True)
        else:
            # SGD has momentum only after a step: dcp fills what it is given, so give it the same keys.
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ddp": state.state_dict()}
            load(saved, checkpoint_id=f"{folder}/dcp")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        said = state.load_state_dict(saved["ddp"])
        train(model, rank, 4, first=4, optimizer=optimizer)
        results.append((weights(model.module), said))
    return results


def run_kept(rank: int, folder: str) -> None:
    """Saves a state of every codec into one folder each."""
    for name, codec in CODECS.items():
        model, state, _ = made(**codec)
        train(model, rank, 2)
        save({"ddp": state.state_dict()}, checkpoint_id=f"{folder}/{name}{state.world_size}")


def run_found(rank: int, folder: str) -> dict[tuple[str, str], str]:
    """Loads each of them, of two ranks and of one, into every codec."""
    said = {}
    for name, codec in CODECS.items():
        for other in CODECS:
            for world in (1, 2):
                _, state, _ = made(**codec)
                kept = {"ddp": state.state_dict() if world == 2 else state.blank_state_dict(world)}
                load(kept, checkpoint_id=f"{folder}/{other}{world}")
                said[f"{other}{world}", name] = state.load_state_dict(kept["ddp"])
                bounds = [each.lag_bound for each in state.core.residuals.contexts.values()]
                assert other != "3lc" or all(bound is None or bound.sparsity == 1 for bound in bounds)
    return said


def run_misfits(rank: int) -> tuple[dict[str, str], bool]:
    """The errors of mismatched states, and whether the hook's own state stays."""
    model, state, optimizer = made()
    train(model, rank, 3, optimizer=optimizer)
    saved = copy.deepcopy(state.state_dict())
    part = saved["ranks"][str(rank)]
    without = {**part, "encodes": dict(list(part["encodes"].items())[:-1])}
    foreign = {str(rank): {**part, "residuals": {"fc.weight": torch.zeros(5)}}}
    wrong: dict[str, tuple[ddp.ThinwireState, dict[str, Any]]] = {
        "int8": (made(codec="int8")[1], saved),
        "sum": (made(reduce="sum")[1], saved),
        "encodes": (state, {**saved, "ranks": {str(rank): without}}),
        "foreign": (state, {**saved, "ranks": foreign}),
        "another rank's": (state, {**saved, "ranks": {str(1 - rank): part}}),
    }
    told = {}
    for name, (live, each) in wrong.items():
        before, step = residuals_of(live), live.step
        told[name] = refusal(partial(live.load_state_dict, each))
        assert same(before, residuals_of(live)) and live.step == step, name
    state.load_state_dict(saved)
    return told, same(part["residuals"], residuals_of(state))


def run_half_loaded(rank: int) -> tuple[str, float]:
    """Only rank 1 loads the state that both ranks have saved."""
    model, state, _ = made(codec="auto")
    train(model, rank, 3)
    saved = copy.deepcopy(state.state_dict())
    model, state, _ = made(codec="auto")
    if rank == 1:
        state.load_state_dict(saved)
    begin = time.monotonic()
    return refusal(lambda: train(model, rank, 1)), time.monotonic() - begin


def run_into_auto(rank: int) -> tuple[bool, bool, bool]:
    """Residuals of 3LC in a hook with `auto`, before and after an uncompressed step without gradients."""
    model, state, _ = made()
    train(model, rank, 3)
    automatic, hook, _ = made(codec="auto")
    hook.load_state_dict(state.state_dict())
    waiting = residuals_of(hook)
    backward(automatic, rank, 0, 0.0)
    moved = any(p.grad is not None and bool(p.grad.any()) for p in automatic.parameters())
    return any(r.any() for r in waiting.values()), any(r.any() for r in residuals_of(hook).values()), moved


def run_resized(rank: int, folder: str) -> list[tuple[dict[str, Any], str, str]]:
    """Three ranks resume from the checkpoints of two."""
    results = []
    for how in ("torch.save", "dcp"):
        _, state, _ = made()
        if how == "dcp":
            saved = {"ddp": state.blank_state_dict(2)}
            load(saved, checkpoint_id=f"{folder}/dcp")
            said = state.load_state_dict(saved["ddp"])
        else:
            parts = [torch.load(Path(folder) / f"rank{r}.pt", weights_only=True)["ddp"] for r in (1, 0)]
            said = state.load_state_dict(ddp.merge(parts))
            assert "states of ranks [0] are missing" in refusal(partial(state.load_state_dict, parts[0]))
        results.append((state.state_dict(), said, str(ddp.report(state))))
    return results


FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
ORDERS = {"contiguous": "[0, 1, 2, 3]", "channels_last": "[0, 2, 3, 1]"}


def run_formats(rank: int) -> dict[tuple[str, str], tuple[str, str]]:
    """The answer of a model of each memory format to a state of each, on as many ranks and on one."""

    def made(name: str, group: dist.ProcessGroup | None = None) -> tuple[DistributedDataParallel, ddp.ThinwireState]:
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1))
        model = DistributedDataParallel(net.to(memory_format=FORMATS[name]), process_group=group)
        return model, ddp.compress(model, "topk", fraction=0.05, min_numel=10, measure_link=False)

    def told(state: ddp.ThinwireState, saved: dict[str, Any]) -> str:
        try:
            return state.load_state_dict(saved)
        except tw.ConfigError as error:
            assert not any(each.any() for each in residuals_of(state).values()), "nothing was changed"
            return str(error)

    alone, said = dist.new_group([rank], use_local_synchronization=True), {}
    for was in FORMATS:
        model, state = made(was)
        model(torch.randn(4, 8, 9, 9, generator=torch.Generator().manual_seed(rank))).pow(2).mean().backward()
        own, whole = state.state_dict(), [ddp.AllRanks(state).state_dict()]
        dist.broadcast_object_list(whole)
        for here in FORMATS:
            said[was, here] = told(made(here)[1], own), told(made(here, alone)[1], whole[0])
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def saved(folder: str) -> Ranks:
    run_ranks(1, run_kept, folder)
    cases: dict[str, tuple[Any, ...]] = {
        "first half": (run_first_half, folder),
        "kept": (run_kept, folder),
        "misfits": (run_misfits,),
        "into auto": (run_into_auto,),
        "half loaded": (run_half_loaded,),
        "formats": (run_formats,),
    }
    return run_cases(2, cases)


@pytest.fixture(scope="module")
def resized(saved: Ranks, folder: str) -> list[Any]:
    return run_ranks(3, run_resized, folder)


@pytest.fixture(scope="module")
def loaded(saved: Ranks, folder: str) -> Ranks:
    return run_cases(2, {"second half": (run_second_half, folder), "found": (run_found, folder)})


def test_resume_is_bit_exact_from_rank_files_and_from_dcp(saved: Ranks, loaded: Ranks) -> None:
    for (through, _), results in zip(saved["first half"], loaded["second half"], strict=True):
        for resumed, said in results:
            assert "bit for bit" in said and same(resumed, through)


def test_dcp_folder_loads_into_every_codec_and_number_of_ranks(loaded: Ranks) -> None:
    for said in loaded["found"]:
        assert len(said) == 18
        for (kept, _), text in said.items():
            assert ("bit for bit" if kept.endswith("2") else "from 1 ranks on 2") in text, (kept, text)


def test_state_format_and_merge(saved: Ranks) -> None:
    states = [state for _, state in saved["first half"]]
    for rank, state in enumerate(states):
        fields = {key: state[key] for key in ("format", "world_size", "step", "loss_scale")}
        assert fields == {"format": 1, "world_size": 2, "step": 4, "loss_scale": 1.0}
        kept = state["ranks"][str(rank)]
        shapes = {name: tuple(value.shape) for name, value in kept["residuals"].items()}
        assert shapes == {"0.weight": (3200,), "2.weight": (24000,), "5.weight": (480,)}
        lists = {kind: {name: value.tolist() for name, value in kept[kind].items()} for kind in ("encodes", "owners")}
        assert lists["encodes"] == {"0.weight": [4], "2.weight": [4, 4], "5.weight": [4]}
        assert lists["owners"] == {"0.weight": [1], "2.weight": [0, 1], "5.weight": [0]}
    assert sorted(ddp.merge(states)["ranks"]) == ["0", "1"]
    with pytest.raises(tw.ConfigError, match="step is 4 and 9"):
        ddp.merge([states[0], {**states[1], "step": 9}])
    with pytest.raises(tw.ConfigError, match="at least one"):
        ddp.merge([])


def test_mismatched_states_raise_config_error_and_keep_state(saved: Ranks) -> None:
    for told, restored in saved["misfits"]:
        assert all(text.startswith("ConfigError: ") for text in told.values()), told
        for name, text in {
            "int8": "int8 here keeps no residual",
            "sum": "reduce='mean' and this run 'sum'",
            "encodes": "'encodes' lacks '",
            "foreign": "the model and the exclusions it was saved with",
            "another rank's": "every rank has its own residuals",
        }.items():
            assert text in told[name], told[name]
        assert restored


def test_state_of_another_memory_format_raises_config_error(saved: Ranks) -> None:
    """Residuals lie in the order in which DDP reduces."""
    for said in saved["formats"]:
        for (was, here), (own, resized) in said.items():
            if was == here:
                assert "bit for bit" in own and "from 2 ranks on 1" in resized, said
            for text in (own, resized) if was != here else ():
                assert f"'0.weight' with its dimensions in the order {ORDERS[was]}" in text, said
                assert f"here it is {ORDERS[here]}" in text and "model.to(memory_format=" in text, said


def test_state_loaded_on_one_rank_raises_at_first_step(saved: Ranks) -> None:
    for said, seconds in saved["half loaded"]:
        assert said.startswith("ProtocolError: rank 1 has step = 3 and rank 0 has 0")
        assert seconds < 20, "and not after the group's timeout"


def test_auto_adds_loaded_residuals_to_first_uncompressed_step(saved: Ranks) -> None:
    assert saved["into auto"] == [(True, False, True)] * 2


def test_more_ranks_divide_residuals_and_report_says_so(resized: list[Any]) -> None:
    for results in resized:
        for state, said, report in results:
            assert state["step"] == 4 and state["world_size"] == 3
            assert "from 2 ranks on 3: residuals were summed over the old" in said and said in report
        saved, loaded = (result[0]["ranks"] for result in results)
        for rank, parts in saved.items():
            assert all(residual.any() for residual in parts["residuals"].values())
            assert same(parts["residuals"], loaded[rank]["residuals"])
