"""Checkpoints of the DDP hook on another number of ranks, on other ranks, and where ranks own other slices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

from tests.hooks.ddp.test_state import made, run_first_half
from tests.hooks.ddp_ranks import ddp, refusal, residuals_of, run_cases, run_ranks, same, train


def run_resized(rank: int, folder: str) -> list[tuple[dict[str, Any], str, str]]:
    """Three ranks go on from the checkpoints of two."""
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


def run_all_ranks(rank: int) -> tuple[dict[str, Any], dict[str, Any], str, bool]:
    """The state of this rank, the one that rank 0 saves, and whether each rank gets its residuals back."""
    model, state, _ = made()
    train(model, rank, 3)
    own, whole = state.state_dict(), ddp.AllRanks(state).state_dict()
    told: list[Any] = [whole]
    dist.broadcast_object_list(told)
    _, again, _ = made()
    said = ddp.AllRanks(again).load_state_dict(told[0])
    return own, whole, said, same(residuals_of(state), residuals_of(again))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("states"))
    run_ranks(2, run_first_half, folder)
    return run_cases(3, {"resized": (run_resized, folder), "all ranks": (run_all_ranks,)})


def test_more_ranks_sum_the_residuals_and_the_report_says_so(ranks: dict[str, list[Any]]) -> None:
    for results in ranks["resized"]:
        for state, said, report in results:
            assert state["step"] == 4 and state["world_size"] == 3
            assert "from 2 ranks on 3: residuals were summed over the old" in said and said in report
        saved, loaded = (result[0]["ranks"] for result in results)
        for rank, parts in saved.items():
            assert all(residual.any() for residual in parts["residuals"].values())
            assert same(parts["residuals"], loaded[rank]["residuals"])


def test_all_ranks_brings_every_rank_s_state_to_rank_0(ranks: dict[str, list[Any]]) -> None:
    merged = ddp.merge([own for own, *_ in ranks["all ranks"]])
    for rank, (own, whole, said, restored) in enumerate(ranks["all ranks"]):
        expected = own if rank else merged
        assert list(whole["ranks"]) == list(expected["ranks"])
        for key, part in expected["ranks"].items():
            assert all(same(named, whole["ranks"][key][kind]) for kind, named in part.items() if named)
        assert {**whole, "ranks": {}} == {**expected, "ranks": {}}
        assert "bit for bit" in said and restored
