"""The worker's end of a session over a socket: a blocking connection, whose bytes the loop's thread moves."""

from __future__ import annotations

import socket
import threading
import time

from thinwire.errors import DeadlineError, TransportError
from thinwire.transports.addresses import parse_dialled
from thinwire.transports.base import Connection, check_packet, wire_nbytes
from thinwire.transports.inbox import Inbox
from thinwire.transports.sockets.channel import Channel
from thinwire.transports.sockets.loop import Loop
from thinwire.transports.sockets.options import GREETING, SocketOptions
from thinwire.transports.sockets.pipes import ClearPipe, TlsPipe, context

AGAIN_S = 0.05
"""Between two attempts to reach a server that does not listen yet."""


def connect(
    address: str,
    *,
    connect_timeout_s: float = 10.0,
    options: SocketOptions | None = None,
    loop: Loop | None = None,
) -> Connection:
    """Begins a session with the server at `address`, waiting for it to come up.

    Args:
        address: `host:port`.
        connect_timeout_s: how long the server may take to answer, in seconds.
        options: limits and encryption; None takes the defaults.
        loop: whose thread moves the bytes; it is not closed with the connection. None: one of its own.

    Raises:
        ConfigError: the address cannot be one, or beyond this machine nothing is encrypted.
        DeadlineError: no server answered in time.
        TransportError: the server does not let this worker in, or one end does not trust the other's certificate.
    """
    return SocketConnection(address, connect_timeout_s, options or SocketOptions(), loop)


class SocketConnection(Connection):
    """See `connect`."""

    def __init__(self, address: str, connect_timeout_s: float, options: SocketOptions, loop: Loop | None) -> None:
        host, port = parse_dialled(address)
        options.check(host)
        self.address, self.limit_nbytes = f"{host}:{port}", options.max_message_nbytes
        self._options = options
        self._inbox = Inbox(self.address, options.max_pending_nbytes, self._go_on_reading)
        # Not the inbox's: whoever waits for room to send is not woken by what comes.
        self._out = threading.Condition()
        self._outbox_nbytes = 0
        self._ready = False  # the server has greeted
        deadline = time.monotonic() + connect_timeout_s
        sock = self._dial(host.strip("[]"), port, deadline, connect_timeout_s)
        tls = options.tls
        pipe = ClearPipe() if tls is None else TlsPipe(context(tls, server=False), tls.server_name or host)
        self._own = loop is None
        self._loop = loop or Loop(f"thinwire-read-{self.address}")
        self._channel = Channel(self._loop, sock, pipe, self)
        self._loop.post(self._channel.start)
        self._await_greeting(deadline, connect_timeout_s)

    # ---- for the worker

    def send(self, packet: bytes) -> None:
        check_packet(packet, self._options.max_message_nbytes)
        nbytes, limit = wire_nbytes(packet), self._options.max_pending_nbytes
        with self._out:
            while self._outbox_nbytes and self._outbox_nbytes + nbytes > limit and not self._inbox.ended:
                self._out.wait()
            self._inbox.check_open()
            self._outbox_nbytes += nbytes
            self._loop.post(lambda: self._channel.send(packet))

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        return self._inbox.take(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        self._leave()
        self._loop.post(self._say_goodbye)
        with self._inbox.changed:
            in_time = self._inbox.changed.wait_for(lambda: self._inbox.over, timeout_s)
        self._hang_up()
        if not in_time:
            raise DeadlineError(
                f"the server at {self.address} did not confirm the end of the session within {timeout_s} s; "
                f"what was sent last may be lost"
            )

    def abort(self) -> None:
        self._finish(f"this end has closed the session with {self.address}")
        self._leave()
        self._hang_up()

    # ---- for the channel

    def opened(self, names: tuple[str, ...]) -> None:
        """The server greets next, if it lets this worker in."""

    def received(self, packet: bytes) -> None:
        if not self._ready and packet != GREETING:
            self._channel.close()
            self._finish(f"what listens at {self.address} is no thinwire rank of this version")
            return
        with self._inbox.changed:
            if not self._ready:
                self._ready = True
                self._inbox.changed.notify_all()
            elif not self._inbox.left:
                self.bytes_received += wire_nbytes(packet)
                self._inbox.put(packet)
                if self._inbox.full:
                    self._channel.pause(True)

    def exceeded(self) -> None:
        most = self._options.max_message_nbytes
        self._channel.close()
        self._finish(
            f"the server at {self.address} broke the conversation: it sent a packet over the message limit of {most} "
            "bytes"
        )

    def sent(self, packet: bytes) -> None:
        with self._out:
            self.bytes_sent += wire_nbytes(packet)
            self._outbox_nbytes -= wire_nbytes(packet)
            self._out.notify_all()

    def said_goodbye(self) -> None:
        self._channel.close()
        self._finish(None)

    def finished(self) -> None:
        """This end hangs up when the server has confirmed."""

    def ended(self, reason: str) -> None:
        self._finish(f"lost the server at {self.address}: {reason}")

    # ---- how it begins and ends

    def _dial(self, host: str, port: int, deadline: float, timeout_s: float) -> socket.socket:
        while True:
            left = deadline - time.monotonic()
            try:
                return socket.create_connection((host, port), max(0.01, left))
            except OSError as error:
                if left <= AGAIN_S:
                    raise DeadlineError(
                        f"no server answered at {self.address} within {timeout_s} s; check that it runs, and that the "
                        f"address is right and reachable ({error.strerror or error})"
                    ) from None
                time.sleep(AGAIN_S)

    def _await_greeting(self, deadline: float, timeout_s: float) -> None:
        left_s = max(0.01, deadline - time.monotonic())
        with self._inbox.changed:
            self._inbox.changed.wait_for(lambda: self._ready or self._inbox.over, left_s)
            ready, error = self._ready, self._inbox.error
        if ready and error is None:
            return
        self.abort()
        if error is not None:
            raise TransportError(error)
        raise DeadlineError(f"what listens at {self.address} did not answer within {timeout_s} s")

    def _say_goodbye(self) -> None:
        if not self._channel.closed:
            self._channel.pause(False)
            self._channel.say_goodbye()

    def _go_on_reading(self) -> None:
        self._loop.post(lambda: self._channel.pause(False))

    def _leave(self) -> None:
        self._inbox.leave()
        with self._out:
            self._out.notify_all()

    def _finish(self, error: str | None) -> None:
        self._inbox.finish(error)
        with self._out:
            self._out.notify_all()

    def _hang_up(self) -> None:
        self._loop.post(self._channel.close)
        if self._own:
            self._loop.close()
        self._finish(None)
