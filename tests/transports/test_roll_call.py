"""A roll call, with real processes: all come, and who stays away is named, first in the log and then in the error."""

from __future__ import annotations

import logging
import re
from datetime import timedelta

import torch.distributed as dist

from tests.hooks.ddp_ranks import run_ranks
from thinwire.errors import TransportError
from thinwire.transports import roll_call as module
from thinwire.transports.roll_call import roll_call


def two_calls_then_one_without_the_last(rank: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(module.__name__).addHandler(handler)
    store = dist.distributed_c10d._get_default_store()
    for ranks in ([0, 1, 2], [0, 1, 2], [0, 2]):
        if rank in ranks:
            roll_call(store, rank, ranks, timedelta(seconds=20))
    if rank < 2:
        try:
            roll_call(store, rank, [0, 1, 2], timedelta(seconds=2), patience_s=0.5)
        except TransportError as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_an_absent_rank_is_named_by_those_that_wait() -> None:
    *waiting, absent = run_ranks(3, two_calls_then_one_without_the_last)
    for rank, (told, error) in enumerate(waiting):
        kept = rf"rank 2 kept rank {rank} waiting for \d s: every rank must call compress; waiting for up to 2 s"
        assert re.fullmatch(kept, told), told
        assert error == "rank 2 did not come within 2 s; every rank must call compress"
    assert absent == []
