"""What is special to sessions over sockets: who is let in, and what is cut."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.transports.conftest import Recorder, echo
from thinwire.errors import ConfigError, ProtocolError, TransportError
from thinwire.security.certificates import self_signed
from thinwire.transports import Sender, sockets
from thinwire.transports.base import Identity
from thinwire.transports.sockets import SocketOptions, SocketServer
from thinwire.transports.sockets.channel import HEAD
from thinwire.transports.trust import Caller, Tls

WAIT_S = 20.0
HOST = "ranks.test"


class Served:
    """A server with a recorder, and what it is told."""

    def __init__(self, options: SocketOptions) -> None:
        made: list[Recorder] = []

        def factory(sender: Sender) -> Recorder:
            made.append(Recorder(sender, echo))
            return made[0]

        self.server: SocketServer = sockets.serve(factory, "127.0.0.1:0", options=options)
        self.recorder = made[0]
        host, port = self.server.address.split(":")
        self.place = host, int(port)

    def read_all(self, said: bytes = b"") -> bytes:
        """Says something on a bare socket; returns what comes until the server hangs up."""
        with socket.create_connection(self.place, WAIT_S) as bare:
            bare.settimeout(WAIT_S)
            bare.sendall(said)
            came = b""
            while part := bare.recv(65_536):
                came += part
            return came


@pytest.fixture
def clear() -> Iterator[Served]:
    served = Served(SocketOptions())
    yield served
    served.server.stop(grace_s=0)


def test_both_ends_show_certificates_that_the_other_knows() -> None:
    drawn = [self_signed(f"worker-{rank}", HOST, days=1) for rank in range(3)]
    known = drawn[0].certificate + drawn[1].certificate
    tls = [Tls(root=known, certificate=each.certificate, key=each.key, server_name=HOST) for each in drawn]
    seen: list[Caller] = []

    def ask(caller: Caller) -> Identity:
        seen.append(caller)
        if len(seen) > 1:
            raise ProtocolError("one is enough")
        return Identity(caller.names[0], 1)

    served = Served(SocketOptions(tls=tls[0], authenticate=ask))
    try:
        with sockets.connect(served.server.address, options=SocketOptions(tls=tls[1])) as connection:
            packet = bytes(range(256)) * 5000  # of many records
            connection.send(packet)
            assert connection.receive(WAIT_S) == packet
        assert seen == [Caller(None, ("worker-1", HOST))]
        assert served.recorder.wait_closed() is None
        with pytest.raises(TransportError, match="it does not let this worker in: one is enough"):
            sockets.connect(served.server.address, options=SocketOptions(tls=tls[1]))
        with pytest.raises(TransportError, match="lost the server at"):  # says TLS itself, after the handshake
            sockets.connect(served.server.address, options=SocketOptions(tls=tls[2]))
        for other in (replace(tls[1], server_name="elsewhere"), replace(tls[1], root=drawn[2].certificate)):
            with pytest.raises(TransportError, match="its certificate is not trusted"):
                sockets.connect(served.server.address, options=SocketOptions(tls=other))
        assert [event[0] for event in served.recorder.events] == ["opened", "received", "closed"]
    finally:
        served.server.stop(grace_s=0)


def test_sockets_without_tls_stay_on_this_machine() -> None:
    for host in ("10.0.0.1:7070", "0.0.0.0:0"):
        with pytest.raises(ConfigError, match="need TLS"):
            sockets.serve(lambda sender: Recorder(sender, echo), host)
        with pytest.raises(ConfigError, match="need TLS"):
            sockets.connect(host.replace(":0", ":1"))
    with pytest.raises(ConfigError, match="need a root, a certificate"):
        SocketOptions(tls=Tls(root=b""))


def test_foreign_bytes_end_their_session_alone(clear: Served) -> None:
    connection = sockets.connect(clear.server.address, options=SocketOptions(max_message_nbytes=1000))
    for said in (HEAD.pack(2**31 - 1) + bytes(100), HEAD.pack(2**31 + 2**30) + bytes(100), b"GET / HTTP/1.0\r\n\r\n"):
        clear.read_all(said)
    with socket.create_connection(clear.place, WAIT_S):
        pass
    connection.send(bytes(1000))
    assert connection.receive(WAIT_S) == bytes(1000)
    connection.close()
    opened = [event[1] for event in clear.recorder.events if event[0] == "opened"]
    assert len(opened) == 5 and clear.recorder.wait_closed(0) is None
    for peer in range(1, 5):
        assert clear.recorder.wait_closed(peer) is not None
