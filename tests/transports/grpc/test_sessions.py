"""What a server keeps for a peer, and that it is given up with the session."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from typing import TYPE_CHECKING

import pytest

from thinwire.transports import Sender
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.grpc.client import connect
from thinwire.transports.grpc.server import GrpcServer

if TYPE_CHECKING:
    from tests.transports.conftest import Cluster

WAIT_S = 20.0


def test_unread_packets_are_freed_with_their_session(
    grpc_cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    # Now and then gRPC finds the worker gone where it sends the end; a log that is kept would keep all it was doing.
    for logger in ("grpc", "asyncio"):
        caplog.set_level(logging.CRITICAL, logger)
    seen: list[weakref.ref[object]] = []

    def flood(sender: Sender, peer: int, packet: bytes) -> None:
        server = grpc_cluster.server
        assert isinstance(server, GrpcServer)
        seen.append(weakref.ref(server._sessions[peer]))
        for _ in range(64):
            sender.send(peer, bytes(1_000_000))

    recorder = grpc_cluster.serve(flood)
    with connect(grpc_cluster.server.address, options=GrpcOptions(max_pending_nbytes=100_000)) as connection:
        connection.send(b"1")
        assert connection.receive(WAIT_S) is not None
        connection.abort()
    assert recorder.wait_closed() == "the worker went away"
    until = time.monotonic() + 2.0
    while seen[0]() is not None and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()
    assert seen[0]() is None, "a timer of CHUNK_S, two minutes, still knows it"
