"""`ddp.compress(model, "auto")` with real ranks: one decision on all of them, at every setting, saved and refused."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import batch, ddp, mlp, run_ranks, train, weights
from thinwire.hooks.exchange import piggyback
from thinwire.policies.autopilot.notes import NOTE_NBYTES

Weights = dict[str, torch.Tensor]
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("one bucket", {}),
    ("many", {"bucket_cap_mb": 0.01}),
    ("static", {"bucket_cap_mb": 0.01}),
    ("unused", {"bucket_cap_mb": 0.01, "find_unused_parameters": True}),
)
"""Of DDP, to call its hook."""


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
    told = [len(note) for note in state.auto._arrived]
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
    force(state, 2)
    train(model, rank, 1, first=state.step)
    assert state.auto.setting.name == "int8" and ddp.report(state).sparsity is None
    plain, alike = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    unchanged = ddp.compress(alike, "auto", measure_link=False)
    force(unchanged, 0)
    for each in (plain, alike):
        train(each, rank, 4)
    uncompressed = [weights(plain.module), weights(alike.module)]
    assert unchanged.auto is not None
    pilot = unchanged.auto.pilot
    pilot.memory.note_gap, pilot.memory.doubts = 4, 0
    # Steps that happened to be slow would be doubted, and told of more often.
    pilot.take = lambda notes, level: None  # type: ignore[method-assign]
    pilot.take_wait = lambda wait_s: None  # type: ignore[method-assign]
    watched = []
    for _ in range(13):
        train(alike, rank, 1, first=unchanged.step)
        assert unchanged.auto.piggyback is not None and unchanged.auto._gathering is None
        watched.append((unchanged.auto.watched, unchanged.auto.piggyback._loaded_nbytes >= NOTE_NBYTES))
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


def run_poisoned(rank: int, nonfinite: Any) -> dict[str, Any]:
    """Uncompressed steps of which some have NaN on one rank: measured ones, others, and with DDP in all its ways."""
    found: dict[str, Any] = {}
    for name, options in (*WAYS, ("nobody measures", {})):
        model = DistributedDataParallel(mlp(), **options)
        state = ddp.compress(model, "auto", measure_link=False, nonfinite=nonfinite)
        auto = state.auto
        assert auto is not None
        force(state, 0)
        if name == "static":
            model._set_static_graph()  # type: ignore[no-untyped-call]
        if name == "nobody measures":
            auto.pilot.take = lambda notes, level: None  # type: ignore[method-assign]
            auto.pilot._count_down = lambda *_: None  # type: ignore[method-assign]
            auto.pilot.memory.note_gap, auto.pilot.memory.doubts, auto.pilot.memory.probe = 100, 0, False
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05), []
        for step in range(5):
            skipped, failed = state.steps_skipped, ""
            factor = torch.nan if rank == 1 and step in (0, 2, 3) else 1.0
            optimizer.zero_grad()
            x, y = batch(rank, step)
            try:
                (nn.functional.cross_entropy(model(x), y) * factor).backward()  # type: ignore[no-untyped-call]
            except (tw.NonFiniteError, RuntimeError) as error:  # DDP itself may refuse the steps after the first
                failed = str(error)
            nan = any(each.grad is not None and bool(each.grad.isnan().any()) for each in model.parameters())
            if state.steps_skipped == skipped and not failed:
                optimizer.step()
            seen.append((state.steps_skipped, nan, auto.watched, failed))
        finite = all(bool(value.isfinite().all()) for value in weights(model.module).values())
        found[name] = (seen, finite)
    return found


def test_nan_in_an_uncompressed_step_makes_all_ranks_skip_it() -> None:
    for found in run_ranks(2, run_poisoned, "skip"):
        assert isinstance(found, dict), found
        assert not any(watched for _, _, watched, _ in found["nobody measures"][0])
        for name, (seen, finite) in found.items():
            assert [skipped for skipped, *_ in seen] == [1, 1, 2, 3, 3] and finite, (name, seen)
            assert [nan for _, nan, *_ in seen] == [True, False, True, True, False], (name, seen)


def test_nan_in_an_uncompressed_step_ends_the_training_on_all_ranks_by_default() -> None:
    for found in run_ranks(2, run_poisoned, "raise"):
        assert isinstance(found, dict), found
        for name, (seen, finite) in found.items():
            assert "holds NaN or Inf: some rank's gradient did" in seen[0][3] and all(f for *_, f in seen), (name, seen)
            assert finite and seen[0][0] == 0, name


def run_rolled_back(rank: int) -> list[Any]:
    """Bounds on the lag as they were saved, and as they are loaded while a setting with the least s is in use."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "auto", measure_link=False)
    force(state, 0)
    train(model, rank, 2)
    force(state, 5)
    train(model, rank, 3, first=2)
    bounds = [each.lag_bound for each in state.core.residuals.contexts.values() if each.lag_bound is not None]
    for bound in bounds:
        bound.restore([1.2, *bound.changing()[1:]])  # type: ignore[arg-type]
    saved = copy.deepcopy(state.state_dict())
    was = [bound.changing().tolist() for bound in bounds]
    force(state, 3)
    train(model, rank, 1, first=5)
    low = [bound.sparsity for bound in bounds]
    with pytest.raises(tw.ConfigError, match="does not fit"):
        state.load_state_dict({**saved, "ranks": {str(rank): {kind: {} for kind in saved["ranks"][str(rank)]}}})
    state.load_state_dict(saved)
    assert state.auto is not None
    return [low, was, [bound.changing().tolist() for bound in bounds], str(state.auto)]


def run_limited(rank: int) -> list[Any]:
    """Goes on from 3LC with a limit of the lag that leaves it out, and not from a text that is damaged."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "auto", measure_link=False)
    force(state, 4)
    train(model, rank, 3)
    saved = state.state_dict()
    found: list[Any] = []
    for text in (saved["auto"], "{}", saved["auto"].replace('"level":4', '"level":-4')):
        limited = ddp.compress(DistributedDataParallel(mlp()), "auto", lag_limit=1.5, measure_link=False)
        try:
            said = limited.load_state_dict({**saved, "auto": text})
        except tw.ConfigError as error:
            said = str(error)
        residuals = limited.core.residuals.state_dict()["residuals"].values()
        assert limited.auto is not None
        waits = any(bool(residual.any()) for residual in residuals)
        found.append((said, waits, limited.step, limited.resumed == said, limited.auto.setting.name))
    return found


def test_a_state_is_taken_with_a_smaller_limit_of_the_lag_and_a_damaged_one_changes_nothing() -> None:
    for first, *damaged in run_ranks(2, run_limited):
        assert "bit for bit" in first[0] and first[1:] == (True, 3, True, "int8"), first
        for said, *rest in damaged:
            assert "the state of codec='auto' cannot be read" in said and rest == [False, 0, False, "uncompressed"]


def run_linked(rank: int) -> list[float]:
    """The link that reports reckon with: at first, once the controller has another, and where it knows of none."""
    state = ddp.compress(DistributedDataParallel(mlp()), "auto")
    assert state.auto is not None and not state.auto.pilot.wants_probe, "it is not measured once more"
    assert state.auto.pilot.memory.link_bps == state.link_bps
    found = []
    for known in (state.link_bps, 2e6, 0.0):
        state.auto.pilot.memory.link_bps = known
        found.append(ddp.report(state).link_bps)
    return [*found, state.link_bps]


def run_unwatched(rank: int) -> dict[str, Any]:
    """Steps that nobody measures, of DDP in all its ways, beside plain DDP; and how many waited for in the callback."""
    waited: list[int] = []
    finish = ddp.ThinwireState.finish_reductions

    def counted(state: ddp.ThinwireState) -> None:
        waited.append(len(state.under_way))
        finish(state)

    ddp.ThinwireState.finish_reductions = counted  # type: ignore[method-assign, assignment]
    found = {}
    for name, options in WAYS:
        models = [DistributedDataParallel(mlp(), **options) for _ in range(2)]
        state = ddp.compress(models[1], "3lc", start_step=100, measure_link=False)
        if name == "static":
            models[1]._set_static_graph()  # type: ignore[no-untyped-call]  # which may come late
        for model in models:
            train(model, rank, 3)
        found[name] = ([weights(model.module) for model in models], list(waited), state.step, len(state.under_way))
        waited.clear()
    return found


def run_noted(rank: int, most_nbytes: int) -> dict[str, Any]:
    """Uncompressed steps that are told of, of DDP in all its ways, beside plain DDP; on gradients, or by themselves."""
    piggyback.MOST_NBYTES = most_nbytes  # this process ends with the test
    found = {}
    for name, options in WAYS:
        models = [DistributedDataParallel(mlp(), **options) for _ in range(2)]
        state = ddp.compress(models[1], "auto", measure_link=False)
        auto = state.auto
        assert auto is not None and auto.piggyback is not None
        force(state, 0)
        for model in models if name == "static" else ():  # both, for equal buckets: of three ranks sums have an order
            model._set_static_graph()  # type: ignore[no-untyped-call]
        warned: list[float] = []
        auto.pilot.take_wait = warned.append  # type: ignore[method-assign, assignment]
        auto.pilot.telling_s = lambda _, rank=rank: 1.0 + rank  # type: ignore[method-assign, misc]
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
    return found


def run_quiet(rank: int) -> dict[str, Any]:
    """Ranks tell of steps before a decision, and of odd ones; nothing of what is ordinary."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "auto", measure_link=False)
    auto = state.auto
    assert auto is not None
    force(state, 3)
    train(model, rank, 12)
    auto.pilot.memory.guard, auto.pilot.memory.rest, auto.pilot.memory.norm = 0, 10**6, 100.0
    auto.pilot._doubts.follow = lambda *_: (True, 0.0)  # type: ignore[method-assign]
    odd = {"every": False, "mine": False}
    auto.pilot._doubts.odd = lambda *_: odd["every"] or (odd["mine"] and rank == 1)  # type: ignore[method-assign]
    told = []
    for kind in ("", "mine", "every", ""):
        odd["every"], odd["mine"] = kind == "every", kind == "mine"
        auto.pilot.memory.doubts, auto.pilot.memory.asked = 0, False
        train(model, rank, 1, first=state.step)
        told.append(bytes(auto._core.note or b""))
    kept = state.state_dict()
    state.load_state_dict(kept)
    return {
        "told": [len(note) for note in told],
        "notes": auto.pilot.memory.notes,
        "kept": kept["auto"] == auto.state(),
    }


def run_refusals(rank: int) -> list[str]:
    """One rank without auto, with another limit, and with a scaler; what contradicts itself."""
    said = []
    options: tuple[dict[str, Any], ...] = (
        {"codec": "auto"} if rank else {"codec": "3lc"},
        {"codec": "auto", "lag_limit": 3 + rank},
        {"codec": "auto", "nonfinite": "skip", "scaler": torch.amp.GradScaler("cpu") if rank else None},
    )
    for mine in options:
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
    assert first["kinds"] == {rank: ["encodes", "lags", "orders", "owners", "residuals"] for rank in "01"}
    line = r"  auto +3lc\[s=1\.25,zstd\] since step 26, (1 change|\d+ changes), link (not measured yet|[\d.]+ .bit/s)$"
    assert re.search(line, first["report"], re.MULTILINE), first["report"]
    assert first["report"].splitlines()[0].endswith(" skipped, auto; fp32") and "\n  lag  " in first["report"]
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


def test_going_back_to_a_setting_with_a_larger_s_takes_its_bounds_back_as_they_were() -> None:
    for low, was, now, said in run_ranks(2, run_rolled_back):
        assert (
            said.startswith("3lc[s=1.25,zstd] since step 2, ")
            and {each[0] for each in was} == {1.2}
            and set(low) == {1.0}
        )
        assert now == was


def test_a_report_reckons_with_the_link_that_was_measured_last() -> None:
    for first, later, unknown, measured in run_ranks(2, run_linked):
        assert first == unknown == measured > 0 and later == 2e6


def test_one_rank_without_auto_is_refused_by_the_setting_s_name() -> None:
    for first, second, third in run_ranks(2, run_refusals):
        assert "rank 1 has codec.id = 'auto' and rank 0 has '3lc'; every rank" in first
        assert "rank 1 has codec.lag_limit = 4.0 and rank 0 has 3.0; every rank" in second
        assert "rank 1 has scaler = 'given' and rank 0 has None; every rank" in third


def test_uncompressed_steps_that_nobody_measures_are_plain_ddp_and_no_thread_of_gloo_runs_python() -> None:
    for found in run_ranks(2, run_unwatched):
        for name, ((plain, ours), waited, steps, left) in found.items():
            assert equal(plain, ours) and (steps, left) == (3, 0), name
            if name == "static":
                assert waited == [], "DDP may wait before any callback of ours"
            else:
                assert len(waited) == 3 and max(waited) >= (1 if name == "one bucket" else 2), (name, waited)


@pytest.mark.parametrize("most_nbytes", [piggyback.MOST_NBYTES, 0])
def test_what_ranks_tell_of_uncompressed_steps_changes_no_bit_of_them(most_nbytes: int) -> None:
    ranks = run_ranks(3, run_noted, most_nbytes)
    for found in ranks:
        assert isinstance(found, dict), found
        for name, way in found.items():
            assert equal(*way["weights"]), (name, most_nbytes)
            # The first step has nothing to tell of before it; the least of all is heard one step later.
            assert way["rode"] == ([(2, False), *[(18, False)] * 3] if most_nbytes else [(0, False), *[(0, True)] * 3])
            assert (way["notes"], way["warned"]) == (2, [1.0] * 3), (name, way)
            notes, least_s = way["kept"]
            assert least_s == 1.0 and [len(note) for note in notes] == [2 * NOTE_NBYTES] * 3
            assert way["kept"] == ranks[0][name]["kept"], "all ranks decide with the same"


def test_ranks_tell_nothing_of_ordinary_steps() -> None:
    first, second = run_ranks(2, run_quiet, timeout_s=180.0)
    # A step is told of when the next one begins.
    assert first["told"] == [0, 0, 16, 0] and second["told"] == [0, 16, 16, 0]
    assert first["notes"] == second["notes"] and first["kept"] and second["kept"]
