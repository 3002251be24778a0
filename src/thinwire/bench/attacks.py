"""Attacks on a server, for `thinwire bench hostile`: what strangers do, and workers that are let in and go too far.

Each is a function of a target. None of them stops at a refusal: an attacker does not either.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.errors import ThinwireError
from thinwire.extras import optional
from thinwire.packets import HEAD_NBYTES, pack
from thinwire.schema import Acknowledged, Join, Plan, Push, SessionOpen
from thinwire.transports.addresses import parse_address
from thinwire.transports.base import Connection
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.grpc.client import connect
from thinwire.transports.grpc.options import METHOD, SERVICE, TOKEN_KEY, TOKEN_SCHEME
from thinwire.transports.trust import Tls

if TYPE_CHECKING:
    import grpc
else:  # every process of a benchmark reads this file, also where none of them is a server
    grpc = optional("grpc", "an attack on a server")

LARGE_NBYTES = 255 * 2**20
PIECE_NBYTES = 2**20
Call = Callable[..., Any]
"""Opens a session. grpc's own type of it lacks what a stream can be asked for."""


@dataclass(frozen=True)
class Target:
    """What is attacked.

    Attributes:
        address: the server's.
        options: of worker 1, who is let in.
        plan: with which it may join.
        times: how often things are done that are done many times.
        seconds: how long things are held that are held.
    """

    address: str
    options: GrpcOptions
    plan: Plan
    times: int
    seconds: float

    def socket(self) -> socket.socket:
        """Opens a TCP connection."""
        return socket.create_connection(parse_address(self.address), timeout=30)

    def connect(self) -> Connection:
        """Begins a session as the true worker 1."""
        return connect(self.address, connect_timeout_s=30, options=self.options)

    def join(self) -> Connection:
        """Begins a session and joins."""
        connection = self.connect()
        connection.send(pack(Join(rank=1, plan=self.plan)))
        return connection

    @property
    def tls(self) -> Tls:
        """Worker 1's part in encryption."""
        assert self.options.tls is not None
        return self.options.tls

    @contextlib.contextmanager
    def channel(self) -> Iterator[tuple[Call, tuple[tuple[str, str], ...]]]:
        """Opens one connection for many sessions; yields what opens them, and worker 1's metadata."""
        assert self.options.token is not None
        credentials = grpc.ssl_channel_credentials(self.tls.root, self.tls.key, self.tls.certificate)
        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        with grpc.secure_channel(self.address, credentials, unlimited) as channel:
            yield (
                channel.stream_stream(f"/{SERVICE}/{METHOD}", request_serializer=bytes, response_deserializer=bytes),
                ((TOKEN_KEY, TOKEN_SCHEME + self.options.token()),),
            )


def connects(target: Target) -> None:
    """Connects and drops, at once or after some noise."""
    for number in range(target.times):
        with contextlib.suppress(OSError), target.socket() as opened:
            if number % 2:
                opened.sendall(bytes(64))


def handshakes(target: Target) -> None:
    """Greets in TLS without a certificate and drops."""
    context = ssl.create_default_context(cadata=(target.tls.root or b"").decode())
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    for _ in range(target.times // 10):
        with contextlib.suppress(OSError), target.socket() as opened, context.wrap_socket(opened):
            pass


def callers(target: Target) -> None:
    """Calls without a token, many times over one connection."""
    with target.channel() as (call, _):
        for _ in range(target.times // 4):
            with contextlib.suppress(grpc.RpcError):
                list(call(iter([b"x"]), timeout=30))


def sessions(target: Target) -> None:
    """Opens sessions as a worker that is let in, says a name in each, and drops them: many over one connection."""
    with target.channel() as (call, metadata):
        for number in range(target.times):
            opened = call(iter([pack(SessionOpen(session=f"{number:032x}"))]), metadata=metadata, timeout=30)
            with contextlib.suppress(grpc.RpcError):
                next(opened)
            opened.cancel()


def processes(target: Target) -> None:
    """Opens sessions as a worker that is let in, and drops them: a connection each."""
    for number in range(target.times // 20):
        with contextlib.suppress(ThinwireError), target.connect() as connection:
            connection.send(pack(SessionOpen(session=f"{number:032x}")))
            connection.abort()


def half_open(target: Target) -> None:
    """Opens sessions and never joins: many over some connections, all of them held."""
    held = []
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            call, metadata = stack.enter_context(target.channel())
            timeout_s = target.seconds + 30
            for _ in range(target.times // 100):
                opened = call(_hold(seconds=target.seconds), metadata=metadata, timeout=timeout_s)
                held.append(opened)
        time.sleep(target.seconds)


def silent(target: Target) -> None:
    """Opens connections and says nothing, or half a greeting."""
    with contextlib.ExitStack() as stack:
        for number in range(min(target.times, 500)):
            with contextlib.suppress(OSError):
                opened = stack.enter_context(target.socket())
                if number % 2:
                    opened.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        time.sleep(target.seconds)


def large_stranger(target: Target) -> None:
    """Sends the largest message without a token."""
    with target.channel() as (call, _), contextlib.suppress(grpc.RpcError):
        list(call(iter([bytes(LARGE_NBYTES)]), timeout=60))


def large_first(target: Target) -> None:
    """Sends the largest message in place of a Join, as a worker that is let in, past our own limits."""
    with target.channel() as (call, metadata), contextlib.suppress(grpc.RpcError):
        list(call(iter([bytes(LARGE_NBYTES)]), metadata=metadata, timeout=60))


def large_pushes(target: Target) -> None:
    """Sends the largest packet after having joined: empty frames, then one message of many numbers."""
    empty = bytearray(pack(Push(step=0, tables=())))
    count = (LARGE_NBYTES - len(empty)) // 4
    empty[4:8] = count.to_bytes(4, "little")
    empty[12:20] = (len(empty) + 4 * count).to_bytes(8, "little")
    numbers = pack(Push(step=0, tables=tuple(range(100))))
    body = b"\x93\x00\xdd" + (60 * 2**20).to_bytes(4, "big") + bytes(60 * 2**20) + b"\x90"
    head = numbers[:4] + (0).to_bytes(4, "little") + len(body).to_bytes(4, "little")
    long = head + (HEAD_NBYTES + len(body)).to_bytes(8, "little") + body
    for packet in (bytes(empty) + bytes(4 * count), long):
        with contextlib.suppress(ThinwireError), target.join() as connection:
            connection.send(packet)
            while connection.receive(60) is not None:
                pass


def slow(target: Target) -> None:
    """Joins and begins a large packet that it never ends, many times over one connection."""
    with target.channel() as (call, metadata):
        part = pack(Join(rank=1, plan=target.plan)), bytes(PIECE_NBYTES)
        held = [call(_hold(*part, seconds=target.seconds), metadata=metadata) for _ in range(100)]
        time.sleep(target.seconds)
        for each in held:
            each.cancel()


def flood(target: Target) -> None:
    """Joins and sends small messages as fast as it can."""
    with contextlib.suppress(ThinwireError), target.connect() as connection:
        connection.send(pack(SessionOpen(session="f" * 32)))
        connection.send(pack(Join(rank=1, plan=target.plan)))
        small, until = pack(Acknowledged(count=0)), time.monotonic() + target.seconds
        while time.monotonic() < until:
            connection.send(small)


def _hold(*parts: bytes, seconds: float) -> Iterator[bytes]:
    yield from parts
    time.sleep(seconds)


ATTACKS: dict[str, Callable[[Target], None]] = {
    "nothing": lambda target: time.sleep(target.seconds),
    "connects and drops": connects,
    "handshakes without a certificate": handshakes,
    "calls without a token": callers,
    "silent connections": silent,
    "largest message without a token": large_stranger,
    "sessions opened and dropped": sessions,
    "connections opened and dropped": processes,
    "half-open joins": half_open,
    "largest message before Join": large_first,
    "largest messages after Join": large_pushes,
    "packets that never end": slow,
    "small messages without end": flood,
}
