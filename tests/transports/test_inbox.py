"""What waits to be received, and how it ends; what connections make of it is in test_contract.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from thinwire.errors import TransportError
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

    def test_taking_and_leaving_wake_a_thread_that_waits_for_room(self, inbox: Inbox) -> None:
        inbox.wait_for_room()
        inbox.put(bytes(LIMIT))
        with beside(inbox.wait_for_room):
            inbox.take(0)
        assert not inbox.full
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

    def test_leaving_keeps_the_reason_of_an_earlier_error(self, inbox: Inbox) -> None:
        left, broken, ended = inbox, Inbox("shard-0", LIMIT), Inbox("shard-0", LIMIT)
        for each in (left, broken, ended):
            each.put(b"1")
        assert left.leave() is True
        left.put(b"2")
        assert left.nbytes == 0 and left.ended and not left.over
        for error in ("lost the server", "something later"):
            broken.finish(error)
        ended.finish(None)
        gone = "this end has closed the session with shard-0"
        for each, reason in ((left, gone), (broken, "lost the server"), (ended, gone)):
            assert each.leave() is False
            with pytest.raises(TransportError, match=f"^{reason}$"):
                each.take(0)

    def test_every_end_wakes_a_thread_that_waits(self) -> None:
        ends: list[tuple[Callable[[Inbox], object], str | None]] = [
            (lambda inbox: inbox.finish("lost the server"), "lost the server"),
            (lambda inbox: inbox.finish(None), None),
            (lambda inbox: inbox.leave(), "this end has closed the session with shard-0"),
        ]
        for end, outcome in ends:
            inbox = Inbox("shard-0", LIMIT)
            with beside(lambda inbox=inbox: inbox.take(None)) as taken:  # type: ignore[misc]
                end(inbox)
            assert taken == [outcome]
