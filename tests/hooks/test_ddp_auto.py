"""`ddp.compress(model, "auto")` with real ranks: one decision on all of them, at every setting, saved and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import ddp, mlp, run_ranks, train, weights

Weights = dict[str, torch.Tensor]


def force(state: ddp.ThinwireState, level: int) -> None:
    """Makes the controller decide this, whatever the link."""
    assert state.auto is not None
    state.auto.pilot._decide = lambda: None  # type: ignore[method-assign]
    state.auto.pilot.memory.level = level


def run_settings(rank: int) -> dict[str, Any]:
    """Trains at every setting in turn; then again from a state in the middle; then uncompressed beside plain DDP."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "auto", lag_limit=4, measure_link=False, nonfinite="skip")
    assert state.auto is not None
    waits, names = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for level in (0, 3, 0, 2, 4, 1, 8, 0):
        force(state, level)
        train(model, rank, 3, first=state.step, optimizer=optimizer)
        residuals = state.core.residuals.state_dict()["residuals"].values()
        waits.append(max(float(residual.abs().max()) for residual in residuals))
        names.append(state.auto.setting.name)
    told = [note.step_s > 0 for note in state.auto._arrived]
    force(state, 3)
    train(model, rank, 2, first=state.step, optimizer=optimizer)
    saved, begun = copy.deepcopy(state.state_dict()), copy.deepcopy(model.state_dict())
    ends = []
    for _ in range(2):
        model.load_state_dict(begun)
        said = state.load_state_dict(saved)
        force(state, 5)
        train(model, rank, 3, first=26, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
        ends.append(weights(model.module))
    together = ddp.AllRanks(state).state_dict()
    kinds = {rank: sorted(kept) for rank, kept in together["ranks"].items()}
    report = str(ddp.report(state))
    plain, alike = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    unchanged = ddp.compress(alike, "auto", measure_link=False)
    force(unchanged, 0)
    for each in (plain, alike):
        train(each, rank, 4)
    uncompressed = [weights(plain.module), weights(alike.module)]
    assert unchanged.auto is not None
    unchanged.auto.pilot.memory.note_gap = 4
    watched = []
    for _ in range(13):
        train(alike, rank, 1, first=unchanged.step)
        watched.append((unchanged.auto.watched, unchanged.auto._gathering is not None))
    return {
        "waits": waits,
        "names": names,
        "told": told,
        "said": said,
        "kinds": kinds,
        "ends": ends,
        "report": report,
        "uncompressed": uncompressed,
        "watched": watched[1:],
    }


def run_refusals(rank: int) -> list[str]:
    """One rank without auto, and with another limit; what contradicts itself."""
    said = []
    for mine in ({"codec": "auto"} if rank else {"codec": "3lc"}, {"codec": "auto", "lag_limit": 3 + rank}):
        with pytest.raises(tw.ProtocolError) as refused:
            ddp.compress(DistributedDataParallel(mlp()), measure_link=False, **mine)
        said.append(str(refused.value))
        dist.barrier()
    for wrong, message in (
        ({"codec": "auto", "sparsity": 1.5}, "codec='auto' decides both ways and all options itself; leave out spars"),
        ({"codec": "auto", "codec_down": "int8"}, "leave out codec_down, or name a codec"),
        ({"codec": "auto", "lag_limit": 0}, "lag_limit=0; it is a number of steps above 0"),
        ({"codec": "auto", "target": "speed"}, "target='speed'; allowed are 'time' and 'bytes'"),
        ({"codec": "3lc", "lag_limit": 5}, "only codec='auto' takes lag_limit, and codec is '3lc'; a fixed codec has"),
    ):
        with pytest.raises(tw.ConfigError, match=message):
            ddp.compress(DistributedDataParallel(mlp()), **wrong)
    return said


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_every_setting_trains_all_ranks_alike_and_an_uncompressed_step_leaves_nothing_waiting() -> None:
    first, *others = run_ranks(2, run_settings, timeout_s=180.0)  # kernels of all settings may have to compile
    assert isinstance(first, dict), first
    assert [wait == 0 for wait in first["waits"]] == [name == "uncompressed" for name in first["names"]]
    assert first["names"][:3] == ["uncompressed", "3lc[s=1]", "uncompressed"] and len(set(first["names"])) == 6
    assert "bit for bit" in first["said"]
    assert first["kinds"] == {rank: ["encodes", "lags", "residuals"] for rank in "01"}
    assert "  auto             3lc[s=1.25,zstd] since step 26, " in first["report"]
    for other in others:
        assert first["names"] == other["names"]
        assert all(equal(mine, theirs) for mine, theirs in zip(first["ends"], other["ends"], strict=True))
    assert equal(*first["ends"]), "from one state the same weights"
    assert equal(*first["uncompressed"]), "uncompressed it is plain DDP"
    # Of four steps one is measured, and told of when the next begins.
    kinds = [(True, False), (False, True), (False, False), (False, False)]
    assert sorted(first["watched"]) == sorted(3 * kinds)
    at = first["watched"].index(kinds[0])
    assert (first["watched"] * 2)[at : at + 4] == kinds


def test_one_rank_without_auto_is_refused_by_the_setting_s_name() -> None:
    for first, second in run_ranks(2, run_refusals):
        assert "rank 1 has codec auto = [5.0, 'time'" in first and "and rank 0 has None" in first
        assert "rank 1 has codec auto[0] = 4.0 and rank 0 has 3.0" in second
