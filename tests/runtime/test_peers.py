"""Exchanges of ranks before and after training, sealed or not; and delayed calls of one clock."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from tests.transports.memory_peers import Links, MemoryPeerGroup, groups, on_every_rank
from thinwire.errors import ProtocolError, TransportError
from thinwire.runtime import peers as peers_module
from thinwire.runtime.clock import SystemClock
from thinwire.runtime.peers import agree, from_first, gather, gather_at_first, leave, measure_link
from thinwire.runtime.sealed import LENGTH_NBYTES, SEAL_NBYTES, SealedPeerGroup
from thinwire.transports.peers import PeerGroup, ReceiveBuffer


def test_gather_accepts_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [b"", b"one", b"x" * 1000]
    assert on_every_rank(groups(3), lambda group: gather(group, texts[group.rank])) == [texts] * 3
    assert on_every_rank(groups(1), lambda group: gather(group, b"alone")) == [[b"alone"]]
    monkeypatch.setattr(peers_module, "_MESSAGE_NBYTES", 300)
    texts = [b"first", b"", bytes(range(256)) * 4]
    assert on_every_rank(groups(3), lambda group: gather_at_first(group, texts[group.rank])) == [texts, [], []]
    assert on_every_rank(groups(1), lambda group: gather_at_first(group, b"alone")) == [[b"alone"]]
    assert on_every_rank(groups(3), lambda group: from_first(group, texts[2 - group.rank])) == [texts[2]] * 3


def agree_unless(group: MemoryPeerGroup, other: dict[str, Any]) -> None:
    """Rank 2 has other settings."""
    agree(group, other if group.rank == 2 else {"a": 1})


def test_agree_different_settings_raise_on_every_rank() -> None:
    peers = groups(3)
    assert on_every_rank(peers, lambda group: agree(group, {"a": 1, "b": [2, "three"]})) == [None] * 3
    for settings, text in (
        ({"a": 2}, "rank 2 has a = 2 and rank 0 has 1"),
        ({"a": 1, "c": 4}, "rank 2 has c = 4 and rank 0"),
    ):
        for error in on_every_rank(groups(3), partial(agree_unless, other=settings)):
            assert isinstance(error, ProtocolError) and text in str(error)
    peers = groups(2, timeout_s=0.1)
    with pytest.raises(TransportError, match=r"within 0\.1 s; all of them must call compress"):
        agree(peers[0], {})


def test_measure_link_returns_slowest_on_all_ranks() -> None:
    rates = on_every_rank(groups(3), measure_link)
    assert rates[0] > 0 and len(set(rates)) == 1, "all ranks report the slowest link's"
    assert on_every_rank(groups(1), measure_link) == [0.0]


def test_leave_waits_for_present_ranks() -> None:
    peers = groups(4)
    peers[0].links.lose(1)
    left: list[int] = []

    def go(group: MemoryPeerGroup) -> None:
        if group.rank != 1:
            leave(group, timedelta(seconds=20))
            left.append(group.rank)

    on_every_rank(peers, go)
    assert sorted(left) == [0, 2, 3]
    leave(groups(2)[0], timedelta(seconds=0.05))  # rank 1 never comes: the time is over


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


def test_sealed_tampered_messages_raise_protocol_error() -> None:
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


def test_sealed_different_secrets_raise_protocol_error() -> None:
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


def test_clock_makes_calls_in_order_on_one_thread() -> None:
    clock, made, done = SystemClock(), list[int](), threading.Event()
    before = threading.active_count()
    cancels = [clock.call_later(60.0, partial(made.append, -1)) for _ in range(1000)]
    clock.call_later(0.06, done.set)
    for number in (3, 1, 2):
        clock.call_later(0.01 * number, partial(made.append, number))
    cancelled = clock.call_later(0.0, lambda: None)
    assert threading.active_count() <= before + 1
    for cancel in (*cancels, *cancels, cancelled):
        cancel()
    assert len(clock._waiting) < 20, "nothing is kept of calls that will not be made"
    assert done.wait(20) and made == [1, 2, 3]


def test_clock_thread_ends_after_last_call() -> None:
    clock, before = SystemClock(), set(threading.enumerate())
    for _ in range(3):
        done = threading.Event()
        clock.call_later(0.0, done.set)
        assert done.wait(20)
    clock.call_later(60.0, lambda: None)()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert not clock._running
