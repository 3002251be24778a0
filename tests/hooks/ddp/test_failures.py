"""Ranks that die, stall or never come: an error with rank and cause on every other rank, and never a hang."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import RankError, ddp, mlp, refusal, run_cases, run_ranks, train
from thinwire.errors import SessionLostError

MANY_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.002}


def run_death(rank: int) -> str:
    model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
    ddp.compress(model, "3lc", gather_mb=0, measure_link=False)
    train(model, rank, 2)  # in the second, DDP itself broadcasts its new buckets
    if rank == 2:
        os._exit(1)
    return refusal(lambda: train(model, rank, 3, first=2))


def test_dead_rank_raises_transport_error_on_the_others() -> None:
    *others, dead = run_ranks(3, run_death)
    assert dead is None
    assert all(text.startswith("TransportError: rank") and "is gone" in text for text in others), others


def run_death_in_ddp_s_own_collective(rank: int, buffers: bool) -> str:
    """Rank 2 dies where DDP broadcasts buffers before each forward pass, or all-reduces gradients uncompressed."""
    torch.manual_seed(0)
    inner = nn.Sequential(mlp(), nn.BatchNorm1d(4)) if buffers else mlp()
    model = DistributedDataParallel(inner, **MANY_BUCKETS)
    ddp.compress(model, "3lc", start_step=0 if buffers else 1000, measure_link=False)
    train(model, rank, 2)
    if rank == 2:
        os._exit(1)
    try:
        return refusal(lambda: train(model, rank, 3, first=2))
    except RuntimeError as error:
        return f"RuntimeError: {error}"


def test_death_in_ddp_s_own_collective_may_be_gloo_s_runtime_error() -> None:
    for buffers in (True, False):
        for text in run_ranks(3, run_death_in_ddp_s_own_collective, buffers)[:2]:
            assert re.match("TransportError: .*is gone|RuntimeError: .*gloo", text, re.DOTALL), text


def run_death_between_two_pushes(rank: int) -> str:
    """Rank 2 dies after its push to rank 0: rank 1 finds out, while rank 0 waits for rank 1."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "3lc", measure_link=False)
    train(model, rank, 2)
    peers = state.driver.peers
    send = peers.send

    def send_to_rank_0_alone(peer: int, data: bytearray, tag: int) -> Any:
        if peer != 0:
            os._exit(1)
        transfer = send(peer, data, tag)
        peers.wait(transfer)
        return transfer

    if rank == 2:
        peers.send = send_to_rank_0_alone  # type: ignore[method-assign]
    return refusal(lambda: train(model, rank, 1, first=2))


def test_lost_connection_is_passed_on_with_the_rank_that_is_gone() -> None:
    first, second, _ = run_ranks(3, run_death_between_two_pushes)
    assert "rank 1 gave up: rank 2 is gone" in first and ": rank 2 is gone" in second, (first, second)


def run_death_of_a_shard(rank: int) -> tuple[str, float, float] | None:
    """Ranks that serve each other: the error on this one after rank 2 died, when it came, and when this one ended."""
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    store = dist.distributed_c10d._get_default_store()
    try:
        with tw.distribute(model, inner, group=dist.group.WORLD, design="3lc") as opt:
            train(model, rank, 3, optimizer=opt)
            if rank == 2:
                store.set("died", str(time.time()))
                os._exit(1)
            try:
                train(model, rank, 1000, first=3, optimizer=opt)
            finally:
                heard = time.time()
    except SessionLostError as error:
        died = float(store.get("died"))
        return str(error), heard - died, time.time() - died
    return None


@pytest.mark.long
def test_ranks_that_serve_each_other_hear_who_died() -> None:
    for text, heard_s, ended_s in run_ranks(3, run_death_of_a_shard)[:2]:
        assert text.startswith("rank 2 is gone: its process has ended"), text
        assert heard_s < 2 and ended_s < 10, "and no rank waits for one that cannot come back"


def run_late(rank: int, key: str, steps: int) -> str:
    """Rank 1 calls `compress`, or takes the third step, no sooner than rank 0 has given up."""
    store = dist.distributed_c10d._get_default_store()
    model, timeout = DistributedDataParallel(mlp()), timedelta(seconds=1)
    if steps:
        ddp.compress(model, "3lc", timeout=timeout, measure_link=False)
        train(model, rank, steps)
    if rank == 1:
        store.wait([key])
        return ""
    try:
        if steps:
            return refusal(lambda: train(model, rank, 1, first=steps))
        return refusal(lambda: ddp.compress(model, "3lc", timeout=timeout, measure_link=False))
    finally:
        store.set(key, "")


def test_absent_or_stalled_rank_is_an_error_within_the_timeout() -> None:
    found = run_cases(2, {"stalls": (run_late, "stalls", 2), "never comes": (run_late, "never comes", 0)})
    assert re.match("TransportError: .*all of them must call|.*every rank must call compress", found["never comes"][0])
    assert found["stalls"][0].startswith("DeadlineError: rank 1 kept rank 0 waiting for more than 1 s")


def sleep_for_ever(rank: int) -> None:
    dist.barrier()  # or rank 0 may end while the other still connects to it
    time.sleep(3600 if rank else 0)


def test_run_ranks_shows_the_stack_of_a_silent_rank() -> None:
    with pytest.raises(RankError, match=r"rank 1 said nothing for 3 s; it stands in\n(.*\n)*.*sleep_for_ever"):
        run_ranks(2, sleep_for_ever, timeout_s=3.0)
