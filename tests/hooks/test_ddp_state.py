"""Checkpoints of the hook: exact on as many ranks, carried over to another number, refused where they do not fit."""

from __future__ import annotations

import copy
import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import batch, ddp, mlp, run_ranks, train, weights

CODEC: dict[str, Any] = {"codec": "3lc", "sparsity": 1.75, "measure_link": False}


def made() -> tuple[DistributedDataParallel, ddp.ThinwireState, torch.optim.Optimizer]:
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, **CODEC)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def run_first_half(rank: int, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Trains four steps, saves, trains four more; returns the last weights and the state of the hook."""
    model, state, optimizer = made()
    train(model, rank, 4, optimizer=optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ddp": state.state_dict()}
    torch.save(saved, Path(folder) / f"rank{rank}.pt")
    save(saved, checkpoint_id=f"{folder}/dcp")
    train(model, rank, 4, first=4, optimizer=optimizer)
    return weights(model.module), saved["ddp"]


def run_second_half(rank: int, folder: str) -> list[tuple[dict[str, torch.Tensor], str]]:
    """Goes on from either checkpoint."""
    results = []
    for how in ("torch.save", "dcp"):
        model, state, optimizer = made()
        if how == "torch.save":
            saved = torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True)
        else:
            # SGD has momentum only after a step: dcp fills what it is given, so give it the same keys.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ddp": state.state_dict()}
            load(saved, checkpoint_id=f"{folder}/dcp")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        said = state.load_state_dict(saved["ddp"])
        train(model, rank, 4, first=4, optimizer=optimizer)
        results.append((weights(model.module), said))
    return results


def run_resized(rank: int, folder: str) -> list[tuple[dict[str, Any], str, str]]:
    """Three ranks go on from two ranks' checkpoints, and refuse the states that do not fit."""
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
        results.append((state.state_dict(), said, str(ddp.report(state))))
    own = torch.load(Path(folder) / "rank0.pt", weights_only=True)["ddp"]
    alone = dist.new_group([0, 1])
    with pytest.raises(tw.ConfigError, match=r"the states of ranks \[1\] are missing"):
        state.load_state_dict(own)
    with pytest.raises(tw.ConfigError, match="format 7"):
        state.load_state_dict({**own, "format": 7})
    for damaged in ({"step": "x"}, {"loss_scale": "x"}):
        with pytest.raises(tw.ConfigError, match=r"the state is damaged: .*'x'"):
            state.load_state_dict({**own, **damaged})
    if rank < 2:  # a pair of ranks, as the state was saved by
        pair = ddp.compress(DistributedDataParallel(mlp(), process_group=alone), **CODEC)
        foreign = {**own, "ranks": {str(rank): {**own["ranks"]["0"], "residuals": {"fc.weight": torch.zeros(5)}}}}
        with pytest.raises(tw.ConfigError, match="load it with the model and the exclusions it was saved with"):
            pair.load_state_dict(foreign)
        if rank == 1:
            with pytest.raises(tw.ConfigError, match="every rank has residuals of its own"):
                pair.load_state_dict(own)
    return results


def test_resume_is_exact_to_the_bit_and_another_number_of_ranks_carries_on(tmp_path: Path) -> None:
    through = run_ranks(2, run_first_half, str(tmp_path))
    for rank, results in enumerate(run_ranks(2, run_second_half, str(tmp_path))):
        for resumed, said in results:
            assert "bit for bit" in said
            assert all(torch.equal(resumed[name], through[rank][0][name]) for name in resumed)
    for results in run_ranks(3, run_resized, str(tmp_path)):
        for state, said, report in results:
            assert state["step"] == 4 and state["world_size"] == 3
            assert re.search("from 2 ranks on 3: residuals were summed over the old", said) and said in report
        saved, loaded = (result[0]["ranks"] for result in results)
        for rank, parts in saved.items():
            for name, residual in parts["residuals"].items():
                assert residual.any() and torch.equal(residual, loaded[rank]["residuals"][name])


def test_the_format_of_a_state_and_what_does_not_merge(tmp_path: Path) -> None:
    states = [state for _, state in run_ranks(2, run_first_half, str(tmp_path))]
    for rank, state in enumerate(states):
        assert {key: state[key] for key in ("format", "world_size", "step", "loss_scale")} == {
            "format": 1,
            "world_size": 2,
            "step": 4,
            "loss_scale": 1.0,
        }
        kept = state["ranks"][str(rank)]
        assert {name: tuple(value.shape) for name, value in kept["residuals"].items()} == {
            "0.weight": (3200,),
            "2.weight": (24000,),
            "5.weight": (480,),
        }
        lists = {kind: {name: value.tolist() for name, value in kept[kind].items()} for kind in ("encodes", "owners")}
        assert lists["encodes"] == {"0.weight": [4], "2.weight": [4, 4], "5.weight": [4]}
        assert lists["owners"] == {"0.weight": [0], "2.weight": [0, 1], "5.weight": [1]}
    assert sorted(ddp.merge(states)["ranks"]) == ["0", "1"]
    with pytest.raises(tw.ConfigError, match="step is 4 and 9"):
        ddp.merge([states[0], {**states[1], "step": 9}])
    with pytest.raises(tw.ConfigError, match="at least one"):
        ddp.merge([])


def run_other_owners(rank: int) -> list[str]:
    """Goes on where a bias is frozen, from this rank's state and from all ranks'."""
    model, state, optimizer = made()
    train(model, rank, 2, optimizer=optimizer)
    own, whole = state.state_dict(), ddp.AllRanks(state).state_dict()
    told: list[Any] = [whole]
    dist.broadcast_object_list(told)
    module = mlp()
    module.get_parameter("3.bias").requires_grad_(False)
    state = ddp.compress(DistributedDataParallel(module), **CODEC)
    with pytest.raises(tw.ConfigError) as refused:
        state.load_state_dict(own)
    assert not any(residual.any() for residual in state.core.residuals.state_dict()["residuals"].values())
    return [str(refused.value), state.load_state_dict(told[0])]


def test_a_state_of_a_run_where_ranks_owned_other_slices_is_not_taken_as_it_is() -> None:
    for rank, (refused, said) in enumerate(run_ranks(2, run_other_owners)):
        assert re.search(f"other tensors were trained .* the states of ranks .{1 - rank}. are missing", refused), (
            refused
        )
        assert "resumed at step 2 with other owners of slices: residuals were summed" in said


def run_all_ranks(rank: int) -> tuple[dict[str, Any], dict[str, Any], str, bool]:
    """What rank 0 alone would save, and what every rank takes back."""
    model, state, optimizer = made()
    train(model, rank, 3, optimizer=optimizer)
    own, whole = state.state_dict(), ddp.AllRanks(state).state_dict()
    told: list[Any] = [whole]
    dist.broadcast_object_list(told)
    model, state, optimizer = made()
    said = ddp.AllRanks(state).load_state_dict(told[0])
    again = state.state_dict()["ranks"][str(rank)]["residuals"]
    same = all(torch.equal(value, again[name]) for name, value in own["ranks"][str(rank)]["residuals"].items())
    return own, whole, said, same


def test_the_states_of_all_ranks_reach_rank_0() -> None:
    results = run_ranks(3, run_all_ranks)
    merged = ddp.merge([own for own, *_ in results])
    for rank, (own, whole, said, same) in enumerate(results):
        expected = own if rank else merged
        assert list(whole["ranks"]) == list(expected["ranks"])
        for key, part in expected["ranks"].items():
            for kind, named in part.items():
                assert all(torch.equal(value, whole["ranks"][key][kind][name]) for name, value in named.items())
        assert {**whole, "ranks": {}} == {**expected, "ranks": {}}
        assert "bit for bit" in said and same


WAYS = ("all ranks", "merged")
"""`ddp.AllRanks`, as Accelerate, the Trainer and Lightning have it; a file of every rank, as everything else."""


def run_changed(rank: int, folder: str, before: int, turn: int) -> dict[str, dict[str, Any]]:
    """Trains, or goes on from the ranks before, and saves; returns this rank's part of what is still to be added."""
    unsent: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        model, state, optimizer = made()
        place, old = Path(folder) / f"{way} {turn}", Path(folder) / f"{way} {turn - 1}"
        place.mkdir(exist_ok=True)
        if not before:
            train(model, rank, 4, optimizer=optimizer)
        elif way == "merged":
            states = [torch.load(old / f"rank{each}.pt", weights_only=True) for each in range(before)]
            assert f"from {before} ranks on {state.world_size}" in state.load_state_dict(ddp.merge(states))
        else:
            ddp.AllRanks(state).load_state_dict(torch.load(old / "rank0.pt", weights_only=True))
        torch.save((ddp.AllRanks(state) if way == "all ranks" else state).state_dict(), place / f"rank{rank}.pt")
        residuals = state.core.residuals
        unsent[way] = {name: flat.double() for name, flat in residuals.state_dict()["residuals"].items()}
        for name, flat in unsent[way].items():
            for part in residuals.partitions[name]:
                if part.server != rank:  # an owner's own shard counts in full
                    flat[part.start : part.stop] /= state.world_size
    return unsent


def test_four_ranks_then_three_then_five_still_have_the_same_to_add(tmp_path: Path) -> None:
    """To one rounding of float32 for each change, whichever way a framework saves."""
    totals: list[dict[str, dict[str, torch.Tensor]]] = []
    before = 0
    for turn, world in enumerate((4, 3, 5)):
        ranks = run_ranks(world, run_changed, str(tmp_path), before, turn)
        names = ranks[0][WAYS[0]]
        totals.append({way: {name: sum(each[way][name] for each in ranks) for name in names} for way in WAYS})
        before = world
    for way in WAYS:
        for name, first in totals[0][way].items():
            assert first.any() and len(totals[0][way]) == 3
            for changes, total in enumerate(totals[1:], 1):
                error = (total[way][name] - first).abs() / first.abs().clamp_min(1e-30)
                assert error.max() <= 2**-24 * changes, (way, name, changes, error.max())


CODECS: dict[str, Any] = {"auto": {"codec": "auto"}, "3lc": {"codec": "3lc"}, "lag": {"codec": "3lc", "lag": 5}}


def run_kept(rank: int, folder: str) -> None:
    """Saves a state of every codec into one folder each."""
    for name, codec in CODECS.items():
        model = DistributedDataParallel(mlp())
        state = ddp.compress(model, measure_link=False, **codec)
        train(model, rank, 2)
        save({"ddp": state.state_dict()}, checkpoint_id=f"{folder}/{name}{state.world_size}")


def run_found(rank: int, folder: str) -> dict[tuple[str, str], str]:
    """Loads each of them, of two ranks and of one, into every codec."""
    said = {}
    for name, codec in CODECS.items():
        for other in CODECS:
            for world in (1, 2):
                state = ddp.compress(DistributedDataParallel(mlp()), measure_link=False, **codec)
                kept = {"ddp": state.state_dict() if world == 2 else state.blank_state_dict(world)}
                load(kept, checkpoint_id=f"{folder}/{other}{world}")
                said[f"{other}{world}", name] = state.load_state_dict(kept["ddp"])
                assert other != "3lc" or all(
                    context.lag_bound is None or context.lag_bound.sparsity == 1
                    for context in state.core.residuals.contexts.values()
                )
    return said


def test_a_folder_of_any_codec_and_of_one_rank_is_read_by_any_other(tmp_path: Path) -> None:
    for world in (1, 2):
        run_ranks(world, run_kept, str(tmp_path))
    for said in run_ranks(2, run_found, str(tmp_path)):
        assert len(said) == 18
        for (saved, _), text in said.items():
            assert ("bit for bit" if saved.endswith("2") else "from 1 ranks on 2") in text, (saved, text)


def run_groups(rank: int, folder: str) -> list[tuple[str, bool]]:
    """Two pairs of ranks train a model each, and save under one key, and under a key for each pair."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def made() -> tuple[DistributedDataParallel, ddp.ThinwireState]:
        model = DistributedDataParallel(mlp(), process_group=pairs[rank // 2])
        return model, ddp.compress(model, **CODEC)

    model, state = made()
    train(model, rank, 2)
    own, found = state.state_dict(), []
    for key in ("ddp", f"ddp-{rank // 2}"):
        save({key: own}, checkpoint_id=f"{folder}/{len(key)}")
        _, again = made()
        kept = {key: again.state_dict()}
        load(kept, checkpoint_id=f"{folder}/{len(key)}")
        try:
            said = again.load_state_dict(kept[key])
        except tw.ConfigError as error:
            said = str(error)
        loaded = again.state_dict()["ranks"][str(state.rank)]["residuals"]
        mine = own["ranks"][str(state.rank)]["residuals"]
        found.append((said, all(torch.equal(mine[name], each) for name, each in loaded.items())))
    return found


def test_groups_of_ranks_have_keys_of_their_own_and_refuse_each_others_states(tmp_path: Path) -> None:
    together, apart = zip(*run_ranks(4, run_groups, str(tmp_path)), strict=True)
    refused = [said for said, _ in together if "the state is of the ranks" in said]
    assert len(refused) == 2 and all("every group needs a key of its own" in said for said in refused), together
    assert all("bit for bit" in said and same for said, same in apart), apart


def run_elsewhere(rank: int) -> dict[str, Any]:
    """A state is loaded into hooks of other settings; and the model is copied, and saved whole."""
    model, state, optimizer = made()
    train(model, rank, 3, optimizer=optimizer)
    saved = state.state_dict()
    told: dict[str, Any] = {}

    def other(codec: str, **options: Any) -> tuple[DistributedDataParallel, ddp.ThinwireState]:
        wrapped = DistributedDataParallel(mlp())
        return wrapped, ddp.compress(wrapped, codec, measure_link=False, **options)

    damaged = copy.deepcopy(saved)
    name = list(damaged["ranks"][str(rank)]["encodes"])[-1]
    del damaged["ranks"][str(rank)]["encodes"][name]
    for key, (codec, options, each) in {
        "int8": ("int8", {}, saved),
        "sum": ("3lc", {"reduce": "sum"}, saved),
        "damaged": ("3lc", {}, damaged),
    }.items():
        _, hook = other(codec, **options)
        try:
            hook.load_state_dict(each)
        except tw.ConfigError as error:
            told[key] = str(error)
        loaded = hook.core.residuals.state_dict()["residuals"].values()
        assert not any(residual.any() for residual in loaded) and hook.step == 0, "nothing was changed"

    automatic, hook = other("auto")
    hook.load_state_dict(saved)
    waiting = [r.clone() for r in hook.core.residuals.state_dict()["residuals"].values()]
    automatic.zero_grad()
    (0 * automatic(batch(rank, 0)[0]).sum()).backward()
    after = hook.core.residuals.state_dict()["residuals"].values()
    moved = any(p.grad is not None and bool(p.grad.any()) for p in automatic.parameters())
    told["auto"] = (any(r.any() for r in waiting), any(r.any() for r in after), moved)

    kept = io.BytesIO()
    with pytest.warns(UserWarning, match=r"nothing of it is kept, residuals neither: save state.state_dict\(\)"):
        torch.save({"ddp": state}, kept)
    kept.seek(0)
    empty, copy_of = torch.load(kept, weights_only=False)["ddp"], copy.deepcopy(state)
    for call in (empty.state_dict, copy_of.state_dict, lambda: state.load_state_dict(empty)):
        with pytest.raises(tw.ConfigError, match="nothing of the hook's state is in it: save"):
            call()
    with pytest.warns(UserWarning, match="nothing of it is kept"):
        torch.save(model, io.BytesIO())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(model)
    copied(batch(rank, 0)[0]).sum().backward()
    state.close()
    return told


def test_states_of_other_settings_and_copies_of_the_model() -> None:
    for told in run_ranks(2, run_elsewhere):
        assert "and int8 here keeps no residual: load it with the codec it was saved with" in told["int8"]
        assert "the state has reduce='mean' and this run 'sum'" in told["sum"]
        assert "the state's 'encodes' lacks '" in told["damaged"]
        assert told["auto"] == (True, False, True), "what waited goes into the first step, which is uncompressed"
