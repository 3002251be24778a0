"""`ddp.compress(model, "auto")` on three ranks: one decision on all of them, and uncompressed steps are plain DDP's."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import (
    Weights,
    batch,
    ddp,
    force,
    mlp,
    residuals_of,
    run_cases,
    same,
    train,
    weights,
)
from thinwire.hooks.exchange import piggyback
from thinwire.policies.autopilot.notes import NOTE_NBYTES

WAYS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many": {"bucket_cap_mb": 0.01},
    "static": {"bucket_cap_mb": 0.01},
    "unused": {"bucket_cap_mb": 0.01, "find_unused_parameters": True},
}
"""Options of DDP; each makes it call the hook in another way."""
Ranks = dict[str, list[Any]]


def made(**options: Any) -> tuple[DistributedDataParallel, ddp.ThinwireState, Any]:
    """A model, its hook and the hook's controller."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "auto", **{"measure_link": False, **options})
    return model, state, state.auto


def pair(name: str, *codec: Any, **options: Any) -> tuple[list[DistributedDataParallel], ddp.ThinwireState]:
    """Plain DDP and DDP with a hook, with equal buckets: the sums of three ranks depend on them."""
    models = [DistributedDataParallel(mlp(), **WAYS[name]) for _ in range(2)]
    state = ddp.compress(models[1], *codec, measure_link=False, **options)
    for model in models if name == "static" else ():
        model._set_static_graph()  # type: ignore[no-untyped-call]  # after the hook
    return models, state


def run_settings(rank: int) -> dict[str, Any]:
    """Trains at every setting in turn, then twice from a state in the middle."""
    model, state, auto = made(lag_limit=4, nonfinite="skip")
    waits, names = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for level in (0, 3, 0, 2, 4, 1, 8, 0):
        force(state, level)
        train(model, rank, 3, first=state.step, optimizer=optimizer)
        waits.append(max(float(residual.abs().max()) for residual in residuals_of(state).values()))
        names.append(auto.setting.name)
    force(state, 3)
    train(model, rank, 2, first=state.step, optimizer=optimizer)
    saved, begun = copy.deepcopy(state.state_dict()), copy.deepcopy(model.state_dict())
    ends = []
    for _ in range(2):
        model.load_state_dict(begun)
        said = state.load_state_dict(saved)
        force(state, 5)
        train(model, rank, 3, first=26)
        ends.append(weights(model.module))
    together = ddp.AllRanks(state).state_dict()
    report = str(ddp.report(state))
    force(state, 2)
    train(model, rank, 1, first=state.step)
    assert auto.setting.name == "int8" and ddp.report(state).sparsity is None
    return {
        "waits": waits,
        "names": names,
        "said": said,
        "kinds": {each: sorted(kept) for each, kept in together["ranks"].items()},
        "ends": ends,
        "report": report,
    }


def run_measured(rank: int) -> list[tuple[bool, bool]]:
    """Which uncompressed steps are measured, and in which a note travels with the gradient."""
    model, state, auto = made()
    force(state, 0)
    train(model, rank, 4)
    auto.pilot.memory.note_gap, auto.pilot.memory.doubts = 4, 0
    # A step that happens to be slow would be doubted, and told of more often.
    auto.pilot.take = lambda notes, level: None
    auto.pilot.take_wait = lambda wait_s: None
    found = []
    for _ in range(13):
        train(model, rank, 1, first=state.step)
        assert auto._gathering is None
        found.append((auto.watched, auto.piggyback._loaded_nbytes >= NOTE_NBYTES))
    return found[1:]


def run_limited(rank: int) -> list[Any]:
    """Goes on from 3LC with a limit of the lag that leaves 3LC out, and from damaged states of the controller."""
    model, state, _ = made()
    force(state, 4)
    train(model, rank, 3)
    saved = state.state_dict()
    found: list[Any] = []
    for text in (saved["auto"], "{}", saved["auto"].replace('"level":4', '"level":-4')):
        _, limited, auto = made(lag_limit=1.5)
        try:
            said = limited.load_state_dict({**saved, "auto": text})
        except tw.ConfigError as error:
            said = str(error)
        waits = any(bool(residual.any()) for residual in residuals_of(limited).values())
        found.append((said, waits, limited.step, limited.resumed == said, auto.setting.name))
    return found


def run_before_start_step(rank: int) -> dict[str, Any]:
    """Uncompressed steps of a fixed codec beside plain DDP; and how many reductions the last callback waits for."""
    waited: list[int] = []
    finish = ddp.ThinwireState.finish_reductions

    def counted(state: ddp.ThinwireState) -> None:
        waited.append(len(state.under_way))
        finish(state)

    found = {}
    ddp.ThinwireState.finish_reductions = counted  # type: ignore[method-assign, assignment]
    for name in WAYS:
        models, state = pair(name, "3lc", start_step=100)
        for model in models:
            train(model, rank, 3)
        found[name] = ([weights(model.module) for model in models], list(waited), state.step, len(state.under_way))
        waited.clear()
    ddp.ThinwireState.finish_reductions = finish  # type: ignore[method-assign]
    return found


def run_noted(rank: int, most_nbytes: int) -> dict[str, Any]:
    """Uncompressed steps with notes, on gradients or by themselves, beside plain DDP."""
    usual, piggyback.MOST_NBYTES = piggyback.MOST_NBYTES, most_nbytes
    found = {}
    for name in WAYS:
        models, state = pair(name, "auto")
        auto: Any = state.auto
        force(state, 0)
        warned: list[float] = []
        auto.pilot.take_wait = warned.append
        auto.pilot.telling_s = lambda _, rank=rank: 1.0 + rank
        rode = []
        for step in range(4):
            for model in models:
                train(model, rank, 1, first=step)
            rode.append((auto.piggyback._loaded_nbytes, auto._gathering is not None))
        kept = json.loads(auto.state())  # in which is what has just come
        assert auto.piggyback.take() == [] and auto.state() == json.dumps(kept, separators=(",", ":"))
        found[name] = {
            "weights": [weights(model.module) for model in models],
            "notes": auto.pilot.memory.notes,
            "rode": rode,
            "warned": warned,
            "kept": (sorted(kept["arrived"]), kept["alarm"]["least_s"]),
        }
    piggyback.MOST_NBYTES = usual
    return found


def run_quiet(rank: int) -> tuple[list[int], int, bool]:
    """The lengths of notes in ordinary steps, in one that is odd on rank 1, and in one that is odd on all ranks."""
    model, state, auto = made()
    force(state, 3)
    train(model, rank, 12)
    auto.pilot.memory.guard, auto.pilot.memory.rest, auto.pilot.memory.norm = 0, 10**6, 100.0
    auto.pilot._doubts.follow = lambda *_: (True, 0.0)
    odd = {"every": False, "mine": False}
    auto.pilot._doubts.odd = lambda *_: odd["every"] or (odd["mine"] and rank == 1)
    told = []
    for kind in ("", "mine", "every", ""):
        odd["every"], odd["mine"] = kind == "every", kind == "mine"
        auto.pilot.memory.doubts, auto.pilot.memory.asked = 0, False
        train(model, rank, 1, first=state.step)
        told.append(len(auto._core.note or b""))
    kept = state.state_dict()
    state.load_state_dict(kept)
    return told, auto.pilot.memory.notes, kept["auto"] == auto.state()


class Branches(nn.Module):
    """Each step takes one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(16, 40), nn.Linear(16, 40)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        found: torch.Tensor = self.branches[branch](x)
        return found


def run_unused(rank: int) -> list[float]:
    """The second branch's residual: after two compressed steps of it, two uncompressed of the first, and one of it."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = ddp.compress(model, "auto", measure_link=False)
    waits = []
    for step, (level, branch) in enumerate([(4, 1), (4, 1), (0, 0), (0, 0), (0, 1)]):
        force(state, level)
        model.zero_grad()
        model(batch(rank, step)[0], branch).pow(2).mean().backward()
        waits.append(float(residuals_of(state)["branches.1.weight"].abs().max()))
    return waits


def run_half_precision_by_default(rank: int) -> list[Weights]:
    """Uncompressed steps with and without the hook while torch's default dtype is bfloat16."""
    models, state = pair("one bucket", "auto")
    force(state, 0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    inputs = [batch(rank, step) for step in range(3)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        for x, y in inputs:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return [weights(model.module) for model in models]


CASES: dict[str, tuple[Any, ...]] = {
    "settings": (run_settings,),
    "measured": (run_measured,),
    "limited": (run_limited,),
    "before start_step": (run_before_start_step,),
    "notes on gradients": (run_noted, piggyback.MOST_NBYTES),
    "notes by themselves": (run_noted, 0),
    "quiet": (run_quiet,),
    "unused": (run_unused,),
    "half precision": (run_half_precision_by_default,),
}


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run_cases(3, CASES, timeout_s=180.0)  # kernels of all settings may have to compile


def test_every_setting_gives_equal_replicas_and_uncompressed_steps_empty_residuals(ranks: Ranks) -> None:
    first, *others = ranks["settings"]
    assert [wait == 0 for wait in first["waits"]] == [name == "uncompressed" for name in first["names"]]
    assert first["names"][:3] == ["uncompressed", "3lc[s=1]", "uncompressed"] and len(set(first["names"])) == 6
    line = r"  auto +3lc\[s=1\.25,zstd\] since step 26, (1 change|\d+ changes), link (not measured yet|[\d.]+ .bit/s)$"
    assert re.search(line, first["report"], re.MULTILINE), first["report"]
    assert first["report"].splitlines()[0].endswith(" skipped, auto; fp32") and "\n  lag  " in first["report"]
    for other in others:
        assert first["names"] == other["names"]
        assert all(same(mine, theirs) for mine, theirs in zip(first["ends"], other["ends"], strict=True))


def test_state_of_auto_resumes_bit_for_bit(ranks: Ranks) -> None:
    first = ranks["settings"][0]
    assert "bit for bit" in first["said"] and same(*first["ends"])
    assert first["kinds"] == {rank: ["encodes", "lags", "orders", "owners", "residuals"] for rank in "012"}


def test_state_is_taken_with_a_smaller_lag_limit_and_a_damaged_one_changes_nothing(ranks: Ranks) -> None:
    for first, *damaged in ranks["limited"]:
        assert "bit for bit" in first[0] and first[1:] == (True, 3, True, "int8"), first
        for said, *rest in damaged:
            assert "codec='auto' cannot be read" in said and rest == [False, 0, False, "uncompressed"]


def test_one_of_four_uncompressed_steps_is_measured_and_noted_in_the_next(ranks: Ranks) -> None:
    kinds = [(True, False), (False, True), (False, False), (False, False)]
    for watched in ranks["measured"]:
        assert sorted(watched) == sorted(3 * kinds)
        at = watched.index(kinds[0])
        assert (watched * 2)[at : at + 4] == kinds


def test_steps_before_start_step_are_plain_ddp_s_and_finish_in_the_last_callback(ranks: Ranks) -> None:
    """Gloo's threads run no Python."""
    for found in ranks["before start_step"]:
        for name, ((plain, ours), waited, steps, left) in found.items():
            assert same(plain, ours) and (steps, left) == (3, 0), name
            if name == "static":
                assert waited == [], "DDP may wait before any callback of the hook"
            else:
                assert len(waited) == 3 and max(waited) >= (1 if name == "one bucket" else 2), (name, waited)


@pytest.mark.parametrize("way", ["notes on gradients", "notes by themselves"])
def test_notes_reach_all_ranks_and_change_no_bit_of_plain_ddp(ranks: Ranks, way: str) -> None:
    rode = [(2, False), *[(18, False)] * 3] if way == "notes on gradients" else [(0, False), *[(0, True)] * 3]
    for found in ranks[way]:
        for name, each in found.items():
            assert same(*each["weights"]), name
            # The first step has nothing to tell of before it; the least of all is heard one step later.
            assert each["rode"] == rode and (each["notes"], each["warned"]) == (2, [1.0] * 3), (name, each)
            notes, least_s = each["kept"]
            assert least_s == 1.0 and [len(note) for note in notes] == [2 * NOTE_NBYTES] * 3
            assert each["kept"] == ranks[way][0][name]["kept"]


def test_ordinary_steps_have_empty_notes(ranks: Ranks) -> None:
    for rank, (told, notes, kept) in enumerate(ranks["quiet"]):
        # A note follows in the next step.
        assert told == [0, 16 if rank == 1 else 0, 16, 0]
        assert notes == ranks["quiet"][0][1] and kept


def test_unused_branch_keeps_its_residual_through_uncompressed_steps(ranks: Ranks) -> None:
    for _, compressed, *elsewhere, taken in ranks["unused"]:
        assert elsewhere == [compressed] * 2 and compressed > 0 and taken == 0


def test_default_dtype_of_bfloat16_changes_no_bit(ranks: Ranks) -> None:
    for plain, ours in ranks["half precision"]:
        assert same(plain, ours)
