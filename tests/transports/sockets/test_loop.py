"""The thread that watches sockets is woken by every call that is posted, whenever that falls."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from thinwire.transports.sockets import loop as loop_module
from thinwire.transports.sockets.loop import Loop


class Between:
    """The end of a loop's pipe, where another call is posted just before the first bytes are read from it."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._real, self._armed = loop, loop._wakes, True

    def recv(self, size: int) -> bytes:
        if self._armed:
            self._armed = False
            self._loop.post(lambda: None)
        return self._real.recv(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_call_posted_while_the_loop_wakes_up_leaves_it_ready_to_be_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "LOOK_S", 60.0)
    loop = Loop("loop")
    try:
        loop._wakes = Between(loop)  # type: ignore[assignment]
        for _ in range(3):
            done = threading.Event()
            loop.post(done.set)
            assert done.wait(20), "it sleeps until it looks for silent sockets"
            time.sleep(0.05)  # it sleeps again
    finally:
        loop._wake.send(b"\0")
        loop.close()
