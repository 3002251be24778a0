"""Sealed messages between ranks: what arrives, and each way to tamper with them is refused."""

from __future__ import annotations

import time

import pytest

from tests.transports.memory_peers import Links, MemoryPeerGroup, groups, on_every_rank
from thinwire.errors import ProtocolError
from thinwire.runtime.peers import gather
from thinwire.runtime.sealed import LENGTH_NBYTES, SEAL_NBYTES, SealedPeerGroup
from thinwire.transports.peers import PeerGroup, ReceiveBuffer

SECRET = b"0123456789abcdef-of-all-ranks"
TAG = 7


def sealed(size: int = 2) -> tuple[Links, list[SealedPeerGroup]]:
    plain = groups(size)
    made = on_every_rank(plain, lambda group: SealedPeerGroup(group, SECRET))
    assert all(isinstance(each, SealedPeerGroup) for each in made), made
    return plain[0].links, [each for each in made if isinstance(each, SealedPeerGroup)]


def receive(group: PeerGroup, peer: int = 0, tag: int = TAG, room: int = 100) -> bytes:
    return bytes(group.wait(group.receive(peer, ReceiveBuffer(room), tag)))


def test_sealed_messages_arrive_and_are_not_readable() -> None:
    links, (first, second) = sealed()
    said = [b"gradient " * n for n in (1, 2, 11)]
    for message in said:
        for tag in (TAG, TAG + 1):
            first.wait(first.send(1, bytearray(message), tag))
    for tag in (TAG + 1, TAG):
        for message in said:
            assert receive(second, tag=tag)[: len(message)] == message
    sent = [message for messages in links.messages.values() for message in messages]
    assert not any(b"grad" in message for message in sent)
    pushed = links.messages[0, 1, TAG]
    assert [len(each) for each in pushed] == [len(each) + LENGTH_NBYTES + SEAL_NBYTES for each in said]
    both = pushed + links.messages[0, 1, TAG + 1]
    assert len(set(both)) == 2 * len(said), "equal messages look different"
    assert (
        on_every_rank(groups(3), lambda group: gather(SealedPeerGroup(group, SECRET), b"%d" % group.rank))
        == [[b"0", b"1", b"2"]] * 3
    )


def test_tampered_messages_are_refused() -> None:
    links, (first, second) = sealed()
    key, back = (0, 1, TAG), (1, 0, TAG)
    for _ in range(3):
        first.send(1, bytearray(b"a message"), TAG)
    second.send(0, bytearray(b"an answer"), TAG)
    first.send(1, bytearray(b"other tag"), TAG + 1)
    true, other = list(links.messages[key]), links.messages[0, 1, TAG + 1][0]
    flipped = [bytes([*true[0][:at], true[0][at] ^ 1, *true[0][at + 1 :]]) for at in range(len(true[0]))]
    earlier, (again, _) = sealed()
    again.send(1, bytearray(b"a message"), TAG)
    attacks = {
        "the next message in its place": true[1],
        "its own message sent back": links.messages[back][0],
        "of another tag": other,
        "of another run with the same secret": earlier.messages[key][0],
        "nothing but zeros": bytes(len(true[0])),
        "cut short": true[0][:-1],
        "longer than the room": (2**40).to_bytes(8, "little") + true[0][8:],
        **{f"byte {at} changed": each for at, each in enumerate(flipped)},
    }
    for name, attack in attacks.items():
        links.messages[key][:] = [attack]
        links.posted[key] = 0
        second._numbers[False, 0, TAG] = 0
        with pytest.raises(ProtocolError, match="a message from rank 0 cannot be opened"):
            print(name, receive(second))
    links.messages[key][:] = true[:1]
    links.posted[key] = second._numbers[False, 0, TAG] = 0
    assert receive(second)[:9] == b"a message"
    links.messages[key].append(true[0])
    with pytest.raises(ProtocolError, match="cannot be opened"):
        receive(second)  # the same again


def test_ranks_with_different_secrets_are_refused_when_they_meet() -> None:
    secrets = [SECRET, SECRET, b"another-secret-of-rank-2"]
    peers = groups(3, timeout_s=5.0)
    peers[1].before_send = lambda: time.sleep(0.05)

    def meet(group: MemoryPeerGroup) -> SealedPeerGroup:
        try:
            return SealedPeerGroup(group, secrets[group.rank])
        finally:
            group.links.lose(group.rank)  # as in a process that ends here

    found = on_every_rank(peers, meet)
    assert all(isinstance(each, ProtocolError) for each in found), found
    assert "rank 2 cannot be opened: that rank has another key" in str(found[0])
