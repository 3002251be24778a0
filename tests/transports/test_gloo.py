"""Gloo with real processes: messages by tag, leaving together, and a roll call that names a rank that stays away."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.hooks.ddp_ranks import run_ranks
from thinwire.errors import TransportError
from thinwire.runtime.peers import gather, leave
from thinwire.transports import roll_call as module
from thinwire.transports.gloo import GlooPeerGroup
from thinwire.transports.peers import ReceiveBuffer
from thinwire.transports.roll_call import roll_call

TIMEOUT = timedelta(seconds=20)


def talk(rank: int) -> list[Any]:
    group = GlooPeerGroup([0, 1, 2], TIMEOUT)
    heard: list[Any] = [group.rank, group.peers, gather(group, b"x" * rank)]
    receives = [group.receive(peer, ReceiveBuffer(64), tag) for peer in group.peers for tag in (5, 4)]
    texts = [(peer, tag, f"{rank} to {peer}, tag {tag}") for tag in (4, 5) for peer in group.peers]
    sends = [group.send(peer, bytearray(text.encode()), tag) for peer, tag, text in texts]
    heard.append([bytes(group.wait(receive)[:13]).decode() for receive in receives])
    for send in sends:
        group.wait(send)
    leave(group, TIMEOUT)
    return heard


def test_messages_arrive_by_tag_whatever_the_order() -> None:
    for rank, heard in enumerate(run_ranks(3, talk)):
        peers = [other for other in range(3) if other != rank]
        expected = [f"{peer} to {rank}, tag {tag}" for peer in peers for tag in (5, 4)]
        assert heard == [rank, peers, [b"", b"x", b"xx"], expected]


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
