"""The controller of a hook: what all ranks must begin with."""

from __future__ import annotations

import copy
import time

import pytest
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import ddp, mlp, run_ranks, train


def run_half_loaded(rank: int) -> tuple[str, float]:
    """Rank 1 alone loads what both have saved."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "auto", measure_link=False)
    train(model, rank, 3)
    saved = copy.deepcopy(state.state_dict())
    state.close()
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "auto", measure_link=False)
    if rank == 1:
        state.load_state_dict(saved)
    begin = time.monotonic()
    with pytest.raises(tw.ProtocolError) as refused:
        train(model, rank, 1)
    return str(refused.value), time.monotonic() - begin


def test_a_state_that_one_rank_alone_has_loaded_is_named_at_the_first_step() -> None:
    for said, seconds in run_ranks(2, run_half_loaded):
        assert said.startswith("rank 1 has step = 3 and rank 0 has 0; load the state of one step on every rank, or on")
        assert seconds < 20  # and not after the group's timeout
