"""One socket's packets, whichever end it is: framed, through a pipe, both ways without blocking.

On the socket every packet has its length before it, 4 bytes, little-endian. Three lengths are none: 0 is a goodbye,
the largest a sign of life, and one with the highest bit set that of a text, which says why the server ended the
session. Everything here happens on the loop's thread.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from thinwire.transports.base import CHUNK_NBYTES
from thinwire.transports.sockets import options
from thinwire.transports.sockets.loop import READ, WRITE, Loop
from thinwire.transports.sockets.pipes import Pipe

HEAD = struct.Struct("<I")
GOODBYE, ALIVE, REASON = 0, 2**32 - 1, 2**31
RECEIVE_NBYTES = 256 * 1024
JOINED_NBYTES = 64 * 1024
"""A packet up to this size is copied to stand behind its length."""


class Owner(Protocol):
    """Whose packets they are: a session of the server, or the worker's connection.

    Attributes:
        limit_nbytes: of a packet that comes.
    """

    limit_nbytes: int

    def opened(self, names: tuple[str, ...]) -> None:
        """The handshake is done; these names are in the other end's certificate."""

    def received(self, packet: bytes) -> None:
        """A packet came."""

    def exceeded(self) -> None:
        """A packet begins that is larger than the limit; it is not read."""

    def sent(self, packet: bytes) -> None:
        """A packet is about to be written."""

    def said_goodbye(self) -> None:
        """The other end has left in good order."""

    def finished(self) -> None:
        """All is written that was queued before `finish`."""

    def ended(self, reason: str) -> None:
        """The socket is closed, for a reason that the other end gave, or that was found."""


class Channel:
    """A socket and what is on its way through it.

    Args:
        loop: watches the socket, from `start` on.
        sock: connected.
        pipe: this end's.
        owner: is told what happens.
    """

    def __init__(self, loop: Loop, sock: socket.socket, pipe: Pipe, owner: Owner) -> None:
        self._loop, self._sock, self._pipe, self._owner = loop, sock, pipe, owner
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._rest: memoryview | None = None
        self._sealed = memoryview(b"")
        # Not a list of what came: a peer that sends byte by byte would make it many times as large as its packet.
        self._incoming = bytearray()
        self._head = -1
        self._open = self._finishing = self._shut = self._deaf = self._paused = self._posted = self.closed = False
        self._events = 0
        now = time.monotonic()
        self._began = self._heard = self._spoke = self._came_at = self._went_at = now
        self._came = self._went = 0

    def start(self) -> None:
        """Begins the handshake."""
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * options.UNREACHABLE_S))
        self._watch(READ)
        self._guard(self._shake_hands)

    # ---- out

    def send(self, packet: bytes) -> None:
        """Queues a packet."""
        self._queue(len(packet), packet)

    def say_goodbye(self) -> None:
        """Tells the other end, after what is queued, that nothing more is sent."""
        self._queue(GOODBYE, b"")

    def finish(self, reason: str | None = None) -> None:
        """Says goodbye after what is queued; with a reason that, after no more than the packet that has begun.

        What the other end still sends is read until it has heard and closes the socket, or does not for a while.
        """
        if self._finishing or self.closed:
            return
        self._finishing = True
        if not self._open:
            self.close()
        elif reason is None:
            self.say_goodbye()
        else:
            self._outbox.clear()
            text = reason.encode()[:JOINED_NBYTES]
            self._queue(REASON | len(text), text)

    def close(self) -> None:
        """Closes the socket now. The owner is not told."""
        if not self.closed:
            self.closed = True
            self._outbox.clear()
            self._loop.forget(self._sock)

    def pause(self, paused: bool) -> None:
        """Reads nothing more for now, or goes on."""
        if paused != self._paused and not self.closed:
            self._paused, self._heard = paused, time.monotonic()
            self._watch(self._events & ~READ if paused else self._events | READ)

    def _queue(self, head: int, body: bytes) -> None:
        # Not written at once: what is sent together leaves together, and is counted together.
        self._outbox.append((head, body))
        if not self._posted:
            self._posted = True
            self._loop.post(self._write_queued)

    def _write_queued(self) -> None:
        self._posted = False
        if not self.closed and not self._events & WRITE:
            self._guard(self._write)

    def _write(self) -> None:
        while self._sealed or self._seal_next():
            try:
                written = self._sock.send(self._sealed)
            except BlockingIOError:
                self._watch(self._events | WRITE)
                return
            self._went += written
            self._sealed = self._sealed[written:]
        self._spoke = self._went_at = time.monotonic()
        self._watch(self._events & ~WRITE)
        if self._finishing and self._open and not self._shut:
            self._shut = True
            self._sock.shutdown(socket.SHUT_WR)
            self._owner.finished()

    def _seal_next(self) -> bool:
        """Takes the next bytes from the queue; returns whether there are any."""
        piece: bytes | memoryview = b""
        if self._rest is not None:
            piece, self._rest = self._rest[:CHUNK_NBYTES], self._rest[CHUNK_NBYTES:] or None
        elif self._open and self._outbox:
            head, body = self._outbox.popleft()
            if 0 < head < REASON:
                self._owner.sent(body)
            if len(body) > JOINED_NBYTES:
                piece, self._rest = HEAD.pack(head), memoryview(body)
            else:
                piece = HEAD.pack(head) + body
        self._sealed = memoryview(self._pipe.seal(piece) if piece else self._pipe.waiting())
        return bool(self._sealed)

    # ---- in

    def ready(self, events: int) -> None:
        if events & READ:
            self._guard(self._read)
        if events & WRITE and not self.closed:
            self._guard(self._write)

    def _read(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_NBYTES)
        except BlockingIOError:
            return
        self._heard = time.monotonic()
        if not data:
            self._broke("it hung up")
        if self.closed or self._deaf:
            return
        self._came += len(data)
        self._pipe.feed(data)
        if not self._open:
            self._shake_hands()
        if self._open:
            for part in self._pipe.read():
                self._incoming += part
            if len(self._incoming) >= self._needed:
                self._assemble()

    def _shake_hands(self) -> None:
        done = self._pipe.handshake()
        self._write()
        if done:
            self._open = True
            self._owner.opened(self._pipe.names())

    @property
    def _needed(self) -> int:
        """How many bytes are to come before there is something to do."""
        if self._head < 0:
            return HEAD.size
        return 0 if self._head == ALIVE else self._head & ~REASON

    def _assemble(self) -> None:
        data, at = self._incoming, 0
        while not self.closed and len(data) - at >= (needed := self._needed):
            if self._head >= 0:
                with memoryview(data) as view, view[at : at + needed] as body:
                    head, packet, self._head = self._head, body.tobytes(), -1
                self._take(head, packet)
            else:
                [self._head] = HEAD.unpack_from(data, at)
                limit = JOINED_NBYTES if self._head >= REASON else self._owner.limit_nbytes
                if self._needed > limit:
                    self._deaf = True
                    self._owner.exceeded()
                    return
            at += needed
        del data[:at]

    def _take(self, head: int, body: bytes) -> None:
        if 0 < head < REASON:
            self._owner.received(body)
        elif head == GOODBYE:
            self._owner.said_goodbye()
        elif head != ALIVE:
            self._broke(body.decode(errors="replace"))

    # ---- time

    def look(self, now: float) -> None:
        if self._shut:
            if now - self._spoke > options.LINGER_S:
                self._broke("it did not hang up")
            return
        if not self._open:
            if now - self._began > options.HANDSHAKE_S:
                self._broke(f"no handshake within {options.HANDSHAKE_S:g} s")
            return
        if now - self._spoke > options.SIGN_OF_LIFE_S and not (self._finishing or self._events & WRITE):
            self._queue(ALIVE, b"")
        if now - self._heard > options.SILENCE_S and not self._paused:
            self._broke(f"nothing came for {options.SILENCE_S:g} s, not even a sign of life")
            return
        stalled = None
        if self._came >= CHUNK_NBYTES or self._paused or not (self._incoming or self._head >= 0):
            self._came, self._came_at = 0, now
        elif now - self._came_at > options.STALLED_S:
            stalled = "sends a packet"
        if self._went >= CHUNK_NBYTES or not self._events & WRITE:
            self._went, self._went_at = 0, now
        elif now - self._went_at > options.STALLED_S:
            stalled = "reads"
        if stalled is not None:
            self._broke(f"the other end {stalled} at less than {CHUNK_NBYTES} bytes in {options.STALLED_S:g} s")

    # ---- the socket

    def _watch(self, events: int) -> None:
        if events != self._events and not self.closed:
            self._events = events
            self._loop.watch(self._sock, self, events)

    def _guard(self, call: Callable[[], None]) -> None:
        """Does something with the socket or the pipe; what they raise ends it."""
        try:
            call()
        except ssl.SSLCertVerificationError as error:
            self._broke(f"its certificate is not trusted: {error.verify_message}", last=self._pipe.waiting())
        except ssl.SSLError as error:
            self._broke(f"{error.reason or error}".lower().replace("_", " "), last=self._pipe.waiting())
        except OSError as error:
            self._broke(error.strerror or str(error))

    def _broke(self, reason: str, *, last: bytes = b"") -> None:
        """Closes the socket and says why; the other end may be told by a last few bytes."""
        if not self.closed:
            if last:
                with suppress(OSError):
                    self._sock.send(last)
            self.close()
            self._owner.ended(reason)
