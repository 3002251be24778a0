"""A peer group over gloo, with real processes: messages by tag, into buffers that are longer, and leaving together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.hooks.ddp_ranks import run_ranks
from thinwire.runtime.peers import gather, leave
from thinwire.transports.gloo import GlooPeerGroup
from thinwire.transports.peers import ReceiveBuffer

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
