"""One thread that watches sockets: whoever owns one is told when it can be read or written, and once a second."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
LOOK_S = 1.0
"""Between two looks for sockets on which nothing has happened for too long."""

_log = logging.getLogger(__name__)


class Watcher(Protocol):
    """The owner of a socket."""

    def ready(self, events: int) -> None:
        """The socket can be read, written, or both."""

    def look(self, now: float) -> None:
        """Time has passed."""


class Loop:
    """The thread and its sockets. Everything but `post` and `close` is for calls on that thread.

    Args:
        name: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._wakes, self._wake = socket.socketpair()
        for end in (self._wakes, self._wake):
            end.setblocking(False)
        self._selector.register(self._wakes, READ)
        self._watchers: dict[socket.socket, Watcher] = {}
        self._awake = self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> bool:
        """Makes a call on the loop's thread, in order, soon; returns False where the loop is closed. For any thread."""
        if self._closing:
            return False
        self._calls.append(call)
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):  # full, so it wakes up anyway; or closed meanwhile
                self._wake.send(b"\0")
        return True

    def close(self) -> None:
        """Ends the thread after the calls that wait; its sockets are closed. For any other thread."""
        self.post(self._begin_to_close)
        self._thread.join()

    def watch(self, sock: socket.socket, watcher: Watcher, events: int) -> None:
        """Tells `watcher` of these events of a socket from now on; of none, only that time passes."""
        known = sock.fileno() in self._selector.get_map()
        self._watchers[sock] = watcher
        if known and events:
            self._selector.modify(sock, events, watcher)
        elif known:
            self._selector.unregister(sock)
        elif events:
            self._selector.register(sock, events, watcher)

    def forget(self, sock: socket.socket) -> None:
        """Stops watching a socket and closes it."""
        if self._watchers.pop(sock, None) is not None and sock.fileno() in self._selector.get_map():
            self._selector.unregister(sock)
        sock.close()

    def _begin_to_close(self) -> None:
        self._closing = True

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._closing:
            for key, events in self._selector.select(LOOK_S):
                if key.data is not None:
                    self._do(partial(key.data.ready, events))
            with contextlib.suppress(BlockingIOError):
                self._wakes.recv(64)
            # What is posted from here on wakes the loop again: only now, or its byte could be among those just read.
            self._awake = False
            while self._calls:
                self._do(self._calls.popleft())
            if (now := time.monotonic()) - looked >= LOOK_S:
                looked = now
                for watcher in list(self._watchers.values()):
                    self._do(partial(watcher.look, now))
        for sock in [*self._watchers, self._wakes, self._wake]:
            sock.close()
        self._selector.close()

    def _do(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:  # a bug of ours; the other sockets go on
            _log.exception("a socket's owner failed")
