"""How scripts end: what frees a process group while one of its threads, on a busy machine, is still in Python."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ddp_ranks import ddp, mlp, run_ranks, train
from thinwire.hooks.ddp import hook

LATE_S = 0.3


def stay(_: Any) -> None:
    """A callback that keeps gloo's thread."""
    time.sleep(LATE_S)


def run_dropped_after_its_group(rank: int) -> bool:
    """A model that goes after `destroy_process_group()`, while gloo's thread of rank 0 is not done with a collective.

    DDP's reducer would free the group, with the interpreter's lock held, and wait for a thread that waits for the lock:
    of a hook without a state it does. The hook's state has the group, too, and what Python has is freed without it.
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
    """A step that `auto` measures, so that gloo's thread calls it, and the end of all before that thread is done."""
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(mlp(), process_group=group)
    state = ddp.compress(model, "auto", measure_link=False)
    assert state.auto is not None
    state.auto.pilot._decide = lambda: None  # type: ignore[method-assign]  # and so it stays uncompressed
    measured, uncompressed = 0, hook._uncompressed

    def kept(*args: Any, **options: Any) -> Any:
        nonlocal measured
        future = uncompressed(*args, **options)
        measured += args[0].auto.watched
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


def test_a_script_ends_whatever_gloo_s_threads_still_hold() -> None:
    assert run_ranks(2, run_both, timeout_s=30.0) == [(True, 1)] * 2
