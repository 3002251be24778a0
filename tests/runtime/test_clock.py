"""Later calls: in order, cancelled in time, and by one thread however many wait."""

from __future__ import annotations

import threading
from functools import partial

from thinwire.runtime.clock import SystemClock


def test_calls_are_made_in_the_order_of_their_times_by_one_thread() -> None:
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


def test_the_thread_ends_with_the_last_call() -> None:
    clock, before = SystemClock(), set(threading.enumerate())
    for _ in range(3):
        done = threading.Event()
        clock.call_later(0.0, done.set)
        assert done.wait(20)
    clock.call_later(60.0, lambda: None)()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert not clock._running
