"""A probe hears from the loop that serves, and from nobody where that hangs."""

from __future__ import annotations

import threading
from dataclasses import replace

import grpc
import pytest

from tests.transports.conftest import Idle
from thinwire.errors import TransportError
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.grpc.server import serve

OPTIONS = GrpcOptions(health="127.0.0.1:0")


def test_a_probe_is_answered_while_the_loop_runs_and_only_about_the_whole_server() -> None:
    server, hangs = serve(Idle, "127.0.0.1:0", options=OPTIONS), threading.Event()
    with server, grpc.insecure_channel(server.health_address) as channel:
        ask = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        assert ask(b"", timeout=20) == b"\x08\x01", "HealthCheckResponse{status: SERVING}"
        with pytest.raises(grpc.RpcError) as unknown:
            ask(b"\x0a\x01x", timeout=20)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as large:
            ask(bytes(2000), timeout=20)
        assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        def hang() -> None:
            hangs.wait()

        server.post(hang)
        with pytest.raises(grpc.RpcError) as late:
            ask(b"", timeout=0.3)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        hangs.set()
        assert ask(b"", timeout=20) == b"\x08\x01"
        with pytest.raises(TransportError, match=r"port .* is in use"):
            serve(Idle, "127.0.0.1:0", options=replace(OPTIONS, health=server.health_address))


def test_without_the_option_there_is_no_such_port() -> None:
    with serve(Idle, "127.0.0.1:0") as server:
        assert server.health_address == ""
