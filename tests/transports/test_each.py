"""What only one of the transports promises: the order of memory, gloo's tags and roll call, who sockets let in."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.hooks.ddp_ranks import run_ranks
from tests.transports.conftest import Recorder, echo
from thinwire.errors import ConfigError, ProtocolError, TransportError
from thinwire.runtime.peers import gather, leave
from thinwire.security.certificates import self_signed
from thinwire.transports import Sender, sockets
from thinwire.transports import roll_call as module
from thinwire.transports.base import Identity
from thinwire.transports.gloo import GlooPeerGroup
from thinwire.transports.memory import MemoryServer
from thinwire.transports.peers import ReceiveBuffer
from thinwire.transports.roll_call import roll_call
from thinwire.transports.sockets import SocketOptions, SocketServer
from thinwire.transports.sockets.channel import HEAD
from thinwire.transports.trust import Caller, Tls


class Log:
    """A handler that answers every packet and writes down the order of everything."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.lines: list[str] = []

    def opened(self, peer: int) -> None:
        self.lines.append(f"open {peer}")

    def received(self, peer: int, packet: bytes) -> None:
        self.lines.append(f"begin {peer}:{packet[0]}")
        self.sender.send(peer, packet)
        self.sender.call(lambda: self.lines.append(f"called by {peer}:{packet[0]}"))
        if packet[0] == 9:
            self.sender.close(peer)
        self.lines.append(f"end {peer}:{packet[0]}")

    def closed(self, peer: int, error: str | None) -> None:
        self.lines.append(f"close {peer} {error}")


def test_handlers_are_called_in_the_order_of_the_program() -> None:
    logs: list[Log] = []

    def factory(sender: Sender) -> Log:
        logs.append(Log(sender))
        return logs[0]

    server = MemoryServer(factory)
    first, second = server.connect(), server.connect()
    first.send(b"\x01")
    second.send(b"\x09")
    first.close()
    assert logs[0].lines == [
        "open 0",
        "open 1",
        "begin 0:1",
        "end 0:1",
        "called by 0:1",
        "begin 1:9",
        "end 1:9",
        "called by 1:9",
        "close 1 None",
        "close 0 None",
    ]
    assert second.receive(timeout_s=0) == b"\x09"
    assert second.receive(timeout_s=0) is None


TIMEOUT = timedelta(seconds=20)


def talk(rank: int) -> list[Any]:
    group = GlooPeerGroup([0, 1, 2], TIMEOUT)
    heard: list[Any] = [group.rank, group.peers, gather(group, b"x" * rank)]
    receives = [group.receive(peer, ReceiveBuffer(64), tag) for peer in group.peers for tag in (5, 4)]
    texts = [(peer, tag, f"{rank} to {peer}, tag {tag}") for tag in (4, 5) for peer in group.peers]
    sends = [group.send(peer, bytearray(text.encode()), tag) for peer, tag, text in texts]
    heard.append([bytes(group.wait(receive)[:13]).decode() for receive in receives])
    for send in sends:
        group.wait(send)
    leave(group, TIMEOUT)
    return heard


def test_messages_arrive_by_tag_whatever_the_order() -> None:
    for rank, heard in enumerate(run_ranks(3, talk)):
        peers = [other for other in range(3) if other != rank]
        expected = [f"{peer} to {rank}, tag {tag}" for peer in peers for tag in (5, 4)]
        assert heard == [rank, peers, [b"", b"x", b"xx"], expected]


def two_calls_then_one_without_the_last(rank: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(module.__name__).addHandler(handler)
    store = dist.distributed_c10d._get_default_store()
    for ranks in ([0, 1, 2], [0, 1, 2], [0, 2]):
        if rank in ranks:
            roll_call(store, rank, ranks, timedelta(seconds=20))
    if rank < 2:
        try:
            roll_call(store, rank, [0, 1, 2], timedelta(seconds=2), patience_s=0.5)
        except TransportError as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_an_absent_rank_is_named_by_those_that_wait() -> None:
    *waiting, absent = run_ranks(3, two_calls_then_one_without_the_last)
    for rank, (told, error) in enumerate(waiting):
        kept = rf"rank 2 kept rank {rank} waiting for \d s: every rank must call compress; waiting for up to 2 s"
        assert re.fullmatch(kept, told), told
        assert error == "rank 2 did not come within 2 s; every rank must call compress"
    assert absent == []


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
