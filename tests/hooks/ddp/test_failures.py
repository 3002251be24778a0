"""Dead, stalled or absent ranks raise errors that name the rank on all others; a closed hook frees its resources."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import (
    ddp,
    force,
    mlp,
    refusal,
    run_cases,
    run_ranks,
    train,
)
from thinwire.errors import TransportError
from thinwire.hooks import named
from thinwire.hooks.ddp import hook


def run_death_between_two_pushes(rank: int) -> str:
    """Rank 2 dies after its push to rank 0: rank 1 detects it, while rank 0 waits for rank 1."""
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


def test_dead_rank_is_named_on_all_ranks() -> None:
    first, second, _ = run_ranks(3, run_death_between_two_pushes)
    assert "rank 1 gave up: rank 2 is gone" in first and ": rank 2 is gone" in second, (first, second)


def run_death_of_a_shard(rank: int) -> tuple[str, float, float] | None:
    """Ranks with local updates: the error on this one after rank 2 died, when it came, and when this one ended."""
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    store = dist.distributed_c10d._get_default_store()
    try:
        with tw.distribute(model, inner, group=dist.group.WORLD, design="update") as opt:
            train(model, rank, 3, optimizer=opt)
            if rank == 2:
                store.set("died", str(time.time()))
                os._exit(1)
            try:
                train(model, rank, 1000, first=3, optimizer=opt)
            finally:
                heard = time.time()
    except TransportError as error:
        died = float(store.get("died"))
        return str(error), heard - died, time.time() - died
    return None


@pytest.mark.long
def test_local_updates_dead_rank_is_named_on_all_ranks() -> None:
    for text, heard_s, ended_s in run_ranks(3, run_death_of_a_shard)[:2]:
        assert "rank 2 is gone" in text, text
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


def test_absent_or_stalled_rank_raises_within_timeout() -> None:
    found = run_cases(2, {"stalls": (run_late, "stalls", 2), "never comes": (run_late, "never comes", 0)})
    assert re.match("TransportError: .*all of them must call|.*every rank must call compress", found["never comes"][0])
    assert found["stalls"][0].startswith("DeadlineError: rank 1 kept rank 0 waiting for more than 1 s")


LATE_S = 0.3


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("thinwire-pu")]


def run_forgotten(rank: int) -> tuple[bool, list[str], list[str]]:
    """Whether the residuals of a model that was never closed are still there, and threads of it or of tensors."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "3lc", measure_link=False)
    train(model, rank, 2)
    residuals = weakref.ref(state.core.residuals)
    del model, state
    gc.collect()
    left = threads()
    found = {"w": torch.zeros(64, 64)}
    tensors = named.compress(found, measure_link=False)
    tensors.average(found)
    del tensors
    gc.collect()
    return residuals() is None, left, threads()


def run_connections(rank: int) -> tuple[int, int]:
    """How many sockets are open after each of two models that were trained and closed."""
    found = []
    for _ in range(2):
        model = DistributedDataParallel(mlp())
        state = ddp.compress(model, "3lc", measure_link=False)
        train(model, rank, 1)
        state.close()
        del model, state
        gc.collect()
        dist.barrier()
        found.append(len(psutil.Process().net_connections()))
    return found[0], found[1]


def test_garbage_collected_state_frees_residuals_threads_and_sockets() -> None:
    found = run_cases(3, {"forgotten": (run_forgotten,), "connections": (run_connections,)})
    assert found["forgotten"] == [(True, [], [])] * 3
    assert all(first == last for first, last in found["connections"])


def stay(_: Any) -> None:
    """A callback that keeps gloo's thread."""
    time.sleep(LATE_S)


def run_dropped_after_its_group(rank: int) -> bool:
    """A model that goes after `destroy_process_group()`, while gloo's thread of rank 0 is not done with a collective.

    DDP's reducer would free the group, with the interpreter's lock held, and wait for a thread that waits for the lock:
    it does so under a hook without a state. The hook's state has the group, too, and Python frees it without the lock.
    """
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(mlp(), process_group=group)
    ddp.compress(model, "fp32", measure_link=False)
    time.sleep(LATE_S * rank)  # so that rank 0's callback comes before the result
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work is not None
    future = work.get_future()
    if rank == 0:
        future.then(stay)
    future.wait()
    del work, future
    dist.destroy_process_group(group)
    del group, model
    return True


def run_measured(rank: int) -> int:
    """A step with a static graph, so that gloo's thread calls Python, and the end of all before that thread is done."""
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(mlp(), process_group=group)
    state = ddp.compress(model, "auto", measure_link=False)
    force(state, 0)
    model._set_static_graph()  # type: ignore[no-untyped-call]
    measured, uncompressed = 0, hook._uncompressed

    def kept(*args: Any, **options: Any) -> Any:
        nonlocal measured
        future = uncompressed(*args, **options)
        measured += args[0].reduces_late
        if rank == 0:
            future.then(stay)
        return future

    hook._uncompressed = kept
    time.sleep(LATE_S * rank)
    train(model, rank, 1)
    hook._uncompressed = uncompressed
    dist.destroy_process_group(group)
    del group, model, state
    time.sleep(2 * LATE_S)
    return measured


def run_both(rank: int) -> tuple[bool, int]:
    return run_dropped_after_its_group(rank), run_measured(rank)


def test_script_end_while_gloo_threads_run_python_exits_cleanly() -> None:
    assert run_ranks(2, run_both, timeout_s=30.0) == [(True, 1)] * 2
