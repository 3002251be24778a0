"""Checkpoints of the hook: exact on as many ranks, conserving on another number, refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import ddp, mlp, run_ranks, train, weights

CODEC: dict[str, Any] = {"codec": "3lc", "sparsity": 1.75, "measure_link": False}


def made() -> tuple[DistributedDataParallel, ddp.ThinwireState, torch.optim.Optimizer]:
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, **CODEC)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def run_through(rank: int) -> dict[str, torch.Tensor]:
    model, _, optimizer = made()
    train(model, rank, 8, optimizer=optimizer)
    return weights(model.module)


def run_first_half(rank: int, folder: str, how: str) -> dict[str, Any]:
    model, state, optimizer = made()
    train(model, rank, 4, optimizer=optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ddp": state.state_dict()}
    if how == "torch.save":
        torch.save(saved, Path(folder) / f"rank{rank}.pt")
    else:
        save(saved, checkpoint_id=folder)
    return saved["ddp"]


def run_second_half(rank: int, folder: str, how: str) -> tuple[dict[str, torch.Tensor], str]:
    model, state, optimizer = made()
    if how == "torch.save":
        saved = torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True)
    else:
        # SGD has momentum only after a step: dcp fills what it is given, so give it the same keys.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ddp": state.state_dict()}
        load(saved, checkpoint_id=folder)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    said = state.load_state_dict(saved["ddp"])
    train(model, rank, 4, first=4, optimizer=optimizer)
    return weights(model.module), said


@pytest.mark.parametrize("how", ["torch.save", "dcp"])
def test_resume_is_exact_to_the_bit(how: str, tmp_path: Path) -> None:
    through = run_ranks(2, run_through)
    run_ranks(2, run_first_half, str(tmp_path), how)
    for rank, (resumed, said) in enumerate(run_ranks(2, run_second_half, str(tmp_path), how)):
        assert "bit for bit" in said
        assert all(torch.equal(resumed[name], through[rank][name]) for name in resumed)


def pending(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What is still to be added to the averaged gradient: a rank's own share counts in full, others' by 1/ranks."""
    from thinwire.hooks.ddp.plan import Parameter, cut

    world = len(states)
    parameters = [Parameter(n, p.numel(), p.ndim < 2 or p.numel() < 128) for n, p in mlp().named_parameters()]
    slices = cut(parameters, world)
    total: dict[str, torch.Tensor] = {}
    for rank, state in enumerate(states):
        for name, flat in state["ranks"][str(rank)]["residuals"].items():
            weight = torch.full_like(flat, 1 / world)
            for piece in slices[name]:
                if piece.owner == rank:
                    weight[piece.start : piece.stop] = 1
            total[name] = (weight * flat).double() + total.get(name, 0.0)
    return total


def run_resized(rank: int, folder: str, old: int, how: str) -> tuple[dict[str, Any], str, str]:
    _, state, _ = made()
    if how == "dcp":
        saved = {"ddp": state.blank_state_dict(old)}
        load(saved, checkpoint_id=folder)
        said = state.load_state_dict(saved["ddp"])
    else:
        parts = [torch.load(Path(folder) / f"rank{r}.pt", weights_only=True)["ddp"] for r in reversed(range(old))]
        said = state.load_state_dict(ddp.merge(parts))
    return state.state_dict(), said, str(ddp.report(state))


@pytest.mark.parametrize("how", ["torch.save", "dcp"])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_another_number_of_ranks_inherits_what_was_not_sent(world: int, how: str, tmp_path: Path) -> None:
    states = run_ranks(2, run_first_half, str(tmp_path), how)
    results = run_ranks(world, run_resized, str(tmp_path), 2, how)
    before, after = pending(states), pending([result[0] for result in results])
    assert any(bool(value.any()) for value in before.values())
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-7)
    for state, said, report in results:
        assert state["step"] == 4
        assert f"from 2 ranks on {world}" in said and "summed over the old ranks" in said
        assert said in report


def run_load(rank: int, state: dict[str, Any]) -> None:
    made()[1].load_state_dict(state)


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    states = run_ranks(2, run_first_half, str(tmp_path), "torch.save")
    other_model = {**states[0], "ranks": {"0": {**states[0]["ranks"]["0"]}}}
    other_model["ranks"]["0"]["residuals"] = {"fc.weight": torch.zeros(5)}
    for world, state, text in (
        (2, states[0], "every rank has residuals of its own"),
        (3, states[0], r"the states of ranks \[1\] are missing"),
        (2, other_model, "load it with the model and the exclusions it was saved with"),
        (2, {**states[0], "format": 7}, "format 7"),
    ):
        errors = [error for error in run_ranks(world, run_load, state) if error is not None]
        assert errors and all(isinstance(error, tw.ConfigError) for error in errors)
        with pytest.raises(tw.ConfigError, match=text):
            raise errors[0]


def test_states_of_different_runs_do_not_merge(tmp_path: Path) -> None:
    states = run_ranks(2, run_first_half, str(tmp_path), "torch.save")
    with pytest.raises(tw.ConfigError, match="step is 4 and 9"):
        ddp.merge([states[0], {**states[1], "step": 9}])
    with pytest.raises(tw.ConfigError, match="at least one"):
        ddp.merge([])
