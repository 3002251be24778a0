"""Residuals, threads and sockets of a hook end with its state, its model, or the script."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ddp_ranks import Weights, ddp, force, mlp, run_cases, run_ranks, same, train, weights
from thinwire.hooks import named
from thinwire.hooks.ddp import hook

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


def run_group_of_some(rank: int) -> Weights | None:
    """Rank 0 is in one more process group than the others, on which torch's names of new groups depend."""
    alone = dist.new_group([0])
    some = dist.new_group([0, 1])
    found = None
    if rank < 2:
        model = DistributedDataParallel(mlp(), process_group=some)
        ddp.compress(model, "3lc", measure_link=False, timeout=timedelta(seconds=15))
        train(model, rank, 2)
        found = weights(model)
    dist.barrier()
    del alone
    return found


def test_garbage_collected_state_leaves_neither_residuals_threads_nor_sockets() -> None:
    found = run_cases(
        3, {"forgotten": (run_forgotten,), "some": (run_group_of_some,), "connections": (run_connections,)}
    )
    assert found["forgotten"] == [(True, [], [])] * 3
    assert all(first == last for first, last in found["connections"])
    first, second, third = found["some"]
    assert third is None and same(first, second), "ranks in other numbers of groups meet"


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


def test_script_ends_while_gloo_s_threads_are_in_python() -> None:
    assert run_ranks(2, run_both, timeout_s=30.0) == [(True, 1)] * 2
