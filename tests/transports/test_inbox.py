"""What waits to be received, and how it ends; what connections make of it is in test_contract.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from thinwire.errors import DeadlineError, TransportError
from thinwire.transports.base import wire_nbytes
from thinwire.transports.inbox import Inbox

WAIT_S = 20.0
LIMIT = 1000


@pytest.fixture
def inbox() -> Inbox:
    return Inbox("shard-0", LIMIT)


@contextmanager
def beside(call: Callable[[], object]) -> Iterator[list[object]]:
    """Makes a call that must wait, in a thread of its own; its result or error is there after the block."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except TransportError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.02)
    assert thread.is_alive()
    yield outcome
    thread.join(WAIT_S)
    assert not thread.is_alive()


class TestPackets:
    def test_they_are_taken_in_order_and_as_the_objects_they_are(self, inbox: Inbox) -> None:
        packets = [bytes([number]) * 100 for number in range(3)]
        for packet in packets:
            inbox.put(packet)
        assert inbox.nbytes == sum(map(wire_nbytes, packets))
        assert all(inbox.take(0) is packet for packet in packets)
        assert inbox.nbytes == 0

    def test_nothing_in_time_is_an_error_and_what_comes_later_is_taken(self, inbox: Inbox) -> None:
        for timeout_s in (0, 0.01):
            with pytest.raises(DeadlineError, match=f"^nothing came from shard-0 within {timeout_s} s$"):
                inbox.take(timeout_s)
        inbox.put(b"1")
        assert inbox.take(0) == b"1"

    def test_a_packet_wakes_who_waits_for_it(self, inbox: Inbox) -> None:
        with beside(lambda: inbox.take(None)) as taken:
            inbox.put(b"1")
        assert taken == [b"1"]


class TestRoom:
    def test_it_is_told_once_when_a_full_inbox_is_full_no_longer(self) -> None:
        told: list[bool] = []
        inbox = Inbox("shard-0", LIMIT, lambda: told.append(True))
        packet = bytes(400)
        for _ in range(4):
            inbox.put(packet)  # a full inbox takes more: who fills it looks after itself
        assert inbox.full
        for left in (3, 2, 1, 0):
            inbox.take(0)
            assert inbox.full == (left >= 3) and told == [True] * (left < 3)

    def test_taking_wakes_who_waits_for_room(self, inbox: Inbox) -> None:
        inbox.wait_for_room()
        inbox.put(bytes(LIMIT))
        with beside(inbox.wait_for_room):
            inbox.take(0)
        assert not inbox.full

    def test_leaving_wakes_who_waits_for_room(self, inbox: Inbox) -> None:
        inbox.put(bytes(LIMIT))
        with beside(inbox.wait_for_room):
            inbox.leave()


class TestEnds:
    def test_what_came_before_an_error_is_taken_before_it_and_the_error_stays(self, inbox: Inbox) -> None:
        inbox.put(b"1")
        inbox.put(b"2")
        inbox.finish("lost the server")
        inbox.put(b"3")
        assert [inbox.take(0), inbox.take(None)] == [b"1", b"2"]
        for _ in range(2):
            with pytest.raises(TransportError, match=r"^lost the server$"):
                inbox.take(None)
        with pytest.raises(TransportError, match=r"^lost the server$"):
            inbox.check_open()

    def test_what_came_before_a_good_end_is_taken_before_it(self, inbox: Inbox) -> None:
        inbox.check_open()
        inbox.put(b"1")
        inbox.finish(None)
        assert [inbox.take(0), inbox.take(0), inbox.take(None)] == [b"1", None, None]
        with pytest.raises(TransportError, match=r"^the session with shard-0 has ended$"):
            inbox.check_open()

    def test_who_leaves_receives_nothing_more(self, inbox: Inbox) -> None:
        inbox.put(b"1")
        assert inbox.leave() is True
        inbox.put(b"2")
        assert inbox.nbytes == 0 and inbox.ended and not inbox.over
        inbox.finish("lost the server")
        assert inbox.leave() is False
        with pytest.raises(TransportError, match=r"^this end has closed the session with shard-0$"):
            inbox.take(None)
        with pytest.raises(TransportError, match=r"^this end has closed the session with shard-0$"):
            inbox.check_open()

    def test_leaving_after_an_error_keeps_its_reason(self, inbox: Inbox) -> None:
        inbox.put(b"1")
        inbox.finish("lost the server")
        inbox.finish("something later")
        assert inbox.leave() is False
        with pytest.raises(TransportError, match=r"^lost the server$"):
            inbox.take(0)

    def test_leaving_after_a_good_end_is_the_reason(self, inbox: Inbox) -> None:
        inbox.put(b"1")
        inbox.finish(None)
        assert inbox.leave() is False
        with pytest.raises(TransportError, match=r"^this end has closed the session with shard-0$"):
            inbox.take(0)

    @pytest.mark.parametrize(
        ("end", "outcome"),
        [
            (lambda inbox: inbox.finish("lost the server"), "lost the server"),
            (lambda inbox: inbox.finish(None), None),
            (lambda inbox: inbox.leave(), "this end has closed the session with shard-0"),
        ],
        ids=["error", "good order", "left"],
    )
    def test_every_end_wakes_who_waits(self, inbox: Inbox, end: Callable[[Inbox], object], outcome: str | None) -> None:
        with beside(lambda: inbox.take(None)) as taken:
            end(inbox)
        assert taken == [outcome]
