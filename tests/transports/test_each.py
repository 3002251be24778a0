"""Properties of single transports: the order of memory, gloo's tags and roll call."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.hooks.ddp_ranks import run_ranks
from thinwire.errors import TransportError
from thinwire.runtime.peers import gather, leave
from thinwire.transports import gloo as module
from thinwire.transports.base import Sender
from thinwire.transports.gloo import GlooPeerGroup, call_roll
from thinwire.transports.memory import MemoryServer
from thinwire.transports.peers import ReceiveBuffer


class Log:
    """A handler that answers every packet and writes down the order of everything."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.lines: list[str] = []

    def opened(self, peer: int) -> None:
        self.lines.append(f"open {peer}")

    def received(self, peer: int, packet: bytes) -> None:
        self.lines.append(f"begin {peer}:{packet[0]}")
        self.sender.send(peer, packet)
        self.sender.call(lambda: self.lines.append(f"called by {peer}:{packet[0]}"))
        if packet[0] == 9:
            self.sender.close(peer)
        self.lines.append(f"end {peer}:{packet[0]}")

    def closed(self, peer: int, error: str | None) -> None:
        self.lines.append(f"close {peer} {error}")


def test_handlers_are_called_in_the_order_of_the_program() -> None:
    logs: list[Log] = []

    def factory(sender: Sender) -> Log:
        logs.append(Log(sender))
        return logs[0]

    server = MemoryServer(factory)
    first, second = server.connect(), server.connect()
    first.send(b"\x01")
    second.send(b"\x09")
    first.close()
    assert logs[0].lines == [
        "open 0",
        "open 1",
        "begin 0:1",
        "end 0:1",
        "called by 0:1",
        "begin 1:9",
        "end 1:9",
        "called by 1:9",
        "close 1 None",
        "close 0 None",
    ]
    assert second.receive(timeout_s=0) == b"\x09"
    assert second.receive(timeout_s=0) is None


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


def test_messages_arrive_by_tag_in_any_order() -> None:
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
            call_roll(store, rank, ranks, timedelta(seconds=20))
    if rank < 2:
        try:
            call_roll(store, rank, [0, 1, 2], timedelta(seconds=2), patience_s=0.5)
        except TransportError as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_missing_rank_is_named_by_waiting_ranks() -> None:
    *waiting, absent = run_ranks(3, two_calls_then_one_without_the_last)
    for rank, (told, error) in enumerate(waiting):
        kept = rf"rank 2 kept rank {rank} waiting for \d s: every rank must call compress, or tw.distribute, within 2 s"
        assert re.fullmatch(kept, told), told
        assert error == "rank 2 did not come within 2 s; every rank must call compress"
    assert absent == []
