"""Ranks of a group that train by a design: each resumes from its own state, one may fail, and wrong states raise."""

from __future__ import annotations

import io
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import thinwire as tw
from tests.hooks.ddp_ranks import refusal, run_ranks
from tests.hooks.local_runs import inner_optimizer, inner_step, sgd, values, weights, wide
from thinwire.errors import SessionLostError
from thinwire.hooks.resuming import KeptSteps, load_agreed

TOTAL = 14
RESUMED = {"update": 7, "diloco[h=3]": 6, "diloco[h=3,keep=0.5]": 8, "streaming-diloco[h=6,delay=2]": 11, "3lc": 7}
RESUMED |= {"sparseloco[h=3]": 8, "demo": 7}
"""Designs, and the step before which they are saved."""
NEED_SERVERS = {
    "terngrad": "votes and shared scales",
    "mps": "consistency=ssp",
    "3lc[consistency=ssp[5]]": "consistency=ssp",
    "entropy": "downlink=weights",
}
KEPT = ("update", "local-sgd[h=2]", "3lc")


def distribute(model: nn.Module, design: str, **options: Any) -> Any:
    inner = inner_optimizer(design)(model)
    return tw.distribute(model, inner, group=dist.group.WORLD, design=design, **options)


def shared(model: nn.Module, design: str) -> torch.Tensor:
    """Statistics of a batch norm are worker 0's from time to time, unless updates are exchanged."""
    return (weights if design == "3lc" else values)(model)


def saved(model: nn.Module, opt: Any) -> Any:
    """As a script keeps it, in a file that torch reads without pickle."""
    saves: list[tuple[str, Any]] = [("model", model), ("opt", opt)]  # either waits for the last exchange by itself
    file = io.BytesIO()
    torch.save({name: each.state_dict() for name, each in (saves if dist.get_rank() else reversed(saves))}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(design: str, begin: int, at: int | None = None, checkpoint: Any = None) -> tuple[torch.Tensor, Any]:
    """Returns the parameters at the end, and the state before step `at`."""
    rank, kept = dist.get_rank(), None
    model = wide(rank)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
    with distribute(model, design, resume=None if checkpoint is None else checkpoint["opt"]) as opt:
        for step in range(begin, TOTAL):
            if step == at:
                if rank == 0:
                    time.sleep(0.3)  # the other rank has pushed to this one's shard meanwhile, where H is 1
                kept = saved(model, opt)
            inner_step(model, opt, rank, step)
        opt.flush()
        return shared(model, design), kept


def resumes(rank: int) -> dict[str, bool]:
    """The designs that resume bit for bit; `twice`: from a state that was itself saved after a resume."""
    found = {}
    for design, at in RESUMED.items():
        whole, kept = run(design, 0, at)
        found[design] = torch.equal(whole, run(design, at, checkpoint=kept)[0])
    whole, early = run("local-sgd[h=4]", 0, 5)
    again, kept = run("local-sgd[h=4]", 5, 9, early)
    twice, _ = run("local-sgd[h=4]", 9, checkpoint=kept)
    return {**found, "local-sgd": torch.equal(whole, again), "twice": torch.equal(whole, twice)}


def kept_steps(design: str, lost_at: int = 10) -> tuple[bool, list[int], int]:
    """Trains, loses all shards at a step, and resumes with the other rank from the states kept in memory.

    Returns:
        Whether it came to the same bits; the step that each joining went on from; and how many exchanges are kept.
    """
    whole, _ = run(design, 0)
    rank, model = dist.get_rank(), wide(dist.get_rank())
    kept = KeptSteps(model)
    began: list[int] = []
    while len(began) < 3:
        try:
            with distribute(model, design, resume=kept) as opt:
                began.append(opt.steps_done)
                for step in range(opt.steps_done, TOTAL):
                    inner_step(model, opt, rank, step)
                    if (step + 1) % 3 == 0 and not (rank and len(began) == 1 and step > lost_at - 4):
                        kept.add(opt)
                    if step == lost_at and len(began) == 1:
                        raise SessionLostError("as where the link was away for longer than reconnect_s")
                opt.flush()
                break
        except SessionLostError:
            pass
    return torch.equal(whole, shared(model, design)), began, len(kept.steps() or ())


def goes_back(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {design: kept_steps(design) for design in KEPT}
    kept, world = KeptSteps(wide(rank)), dist.group.WORLD
    assert world is not None
    if rank == 0:
        kept.steps()  # it has begun before
    found["one began before"] = refusal(lambda: load_agreed(kept, world))
    kept._states = {7 + rank: kept._states[0]}
    found["no common step"] = refusal(lambda: load_agreed(kept, world))
    found["one keeps none"] = refusal(lambda: load_agreed(kept if rank else None, world))
    return found


def refuses(rank: int) -> dict[str, str]:
    """The error of each state that cannot be resumed from."""
    design = "local-sgd[h=4]"
    _, early = run(design, 0, 5)
    _, kept = run(design, 0, 9)
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, kept)
    state = kept["opt"]
    cases: dict[str, Any] = {
        "of another rank": everyones[0],
        "of another exchange": early if rank else kept,
        "one begins": None if rank else kept,
        "torch's": {**kept, "opt": sgd(wide(rank)).state_dict()},
    }
    damaged: dict[str, Any] = {
        "shared": {**state, "shared": {}},
        "residuals": {**state, "residuals": {**state["residuals"], "owners": 3}},
        "position": {**state, "position": {**state["position"], "rounds": None}},
        "kind": {key: value for key, value in state.items() if key != "outer"},
    }
    for name, each in damaged.items():
        cases[f"damaged {name}"] = {**kept, "opt": each if rank else state}
    found = {name: refusal(partial(run, design, 0, checkpoint=each)) for name, each in cases.items()}
    found["another design"] = refusal(lambda: run(f"local-sgd[h={2 + rank}]", 0))
    wrapped: Any = nn.parallel.DistributedDataParallel(wide(rank))
    hooked: Any = nn.parallel.DistributedDataParallel(wide(rank))
    hooked.register_comm_hook(None, allreduce_hook)
    compiled: Any = torch.compile(wrapped, backend="eager")
    for name, given in (("compiled", compiled), ("hooked", hooked)):
        found[name] = refusal(partial(distribute, given, "update"))
    for each in NEED_SERVERS:
        found[each] = refusal(partial(distribute, wide(rank), each))
    return found


class Mine(Exception):
    """Rank 0's error."""


def fails(rank: int) -> tuple[str, float]:
    """Each rank's error and seconds until it: rank 0 fails while rank 1, connected, is frozen."""

    def stopped(process: int) -> bool:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    processes, model = [0, 0], wide(rank)
    dist.all_gather_object(processes, os.getpid())
    began, told = time.monotonic(), "trains on alone"
    try:
        with distribute(model, "local-sgd[h=2]") as opt:
            for step in range(4):
                inner_step(model, opt, rank, step)
            opt.sync()
            dist.barrier()  # both have had the other one's answers
            if rank == 0:
                while not stopped(processes[1]):
                    time.sleep(0.05)
                began = time.monotonic()
                raise Mine
            os.kill(os.getpid(), signal.SIGSTOP)
            for step in (4, 5):
                inner_step(model, opt, rank, step)
            opt.sync()
    except Exception as error:
        told = type(error).__name__
    seconds = time.monotonic() - began
    if rank == 0:
        os.kill(processes[1], signal.SIGCONT)
    dist.barrier()
    return told, seconds


def everything(rank: int) -> dict[str, Any]:
    """All cases run on the same ranks, because starting ranks takes longer than most cases."""
    return {each.__name__: each(rank) for each in (resumes, goes_back, refuses, fails)}


REFUSED = {
    "of another rank": "the state is of rank 0 of 2, and this is rank 1 of 2",
    "of another exchange": "rank 0: exchange 2 at step 9, rank 1: exchange 1 at step 5",
    "one begins": "rank 0: exchange 2 at step 9, rank 1: none",
    "another design": "rank 1 has h = 3 and rank 0 has 2",
    "torch's": "the state is one that torch's own optimizer returned",
    **dict.fromkeys(
        (f"damaged {name}" for name in ("shared", "residuals", "position", "kind")),
        "the state that rank 1 of 2 resumes from is one that cannot be taken (",
    ),
    "compiled": "compile what it wraps",
    "hooked": "has a communication hook already",
    **NEED_SERVERS,
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, everything, group_timeout_s=60.0)


def test_resume_from_own_states_is_bit_identical(found: list[dict[str, Any]]) -> None:
    names = (*RESUMED, "local-sgd", "twice")
    assert [each["resumes"] for each in found] == [dict.fromkeys(names, True)] * 2


def test_lost_shards_resume_together_from_kept_steps(found: list[dict[str, Any]]) -> None:
    """One rank kept the state after step 9, and the other none newer than that after step 6."""
    for each in found:
        back = each["goes_back"]
        assert {name: back[name] for name in KEPT} == dict.fromkeys(KEPT, (True, [0, 6], 2))
        assert back["one began before"] == "nothing"
        assert "rank 0: 7, rank 1: 8" in back["no common step"]
        assert "ranks [1] keep states to resume from" in back["one keeps none"]


def test_damaged_or_foreign_states_raise_on_every_rank(
    found: list[dict[str, Any]],
) -> None:
    for each in found:
        assert each["refuses"].keys() == REFUSED.keys()
        for name, told in REFUSED.items():
            assert told in each["refuses"][name], (name, each["refuses"][name])


def test_failing_rank_raises_its_error_at_once_with_frozen_peer(found: list[dict[str, Any]]) -> None:
    (mine, seconds), (theirs, _) = (each["fails"] for each in found)
    assert mine == "Mine" and seconds < 20
    assert theirs in ("TransportError", "SessionLostError", "ProtocolError")
