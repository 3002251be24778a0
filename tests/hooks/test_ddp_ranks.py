"""What a failing test is told of a rank that says nothing."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from tests.hooks.ddp_ranks import RankError, run_ranks


def sleep_for_ever(rank: int) -> None:
    dist.barrier()  # or rank 0 may end while the other still connects to it
    time.sleep(3600 if rank else 0)


def test_of_a_rank_that_says_nothing_is_said_where_it_stands() -> None:
    with pytest.raises(RankError, match=r"rank 1 said nothing for 3 s; it stands in\n(.*\n)*.*sleep_for_ever"):
        run_ranks(2, sleep_for_ever, timeout_s=3.0)
