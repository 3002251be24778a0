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
