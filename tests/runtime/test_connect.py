"""Forms of a server's address."""

from __future__ import annotations

import socket

import pytest

from tests.server.conversation import make_plan
from thinwire.errors import ConfigError, DeadlineError
from thinwire.packets import pack
from thinwire.runtime.connect import connect
from thinwire.runtime.serving import serving
from thinwire.schema import Join
from thinwire.server.core import ServerCore
from thinwire.transports import grpc
from thinwire.transports.memory import MemoryServer


@pytest.mark.parametrize(
    "address", ["127.0.0.1:7070", "http://127.0.0.1:7070", "grpc://", "://x:1", "", "grpc:/x:7070"]
)
def test_another_form_is_refused_and_the_right_one_said(address: str) -> None:
    with pytest.raises(ConfigError, match="expected grpc://host:port") as caught:
        connect(address)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("address", ["grpc://nohost", "grpc://127.0.0.1:port", "grpc://127.0.0.1:99999", "grpc://h:0"])
def test_a_port_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match=address.removeprefix("grpc://")):
        connect(address, connect_timeout_s=1)


def test_a_connection_is_taken_as_it_is() -> None:
    with MemoryServer(serving(ServerCore())) as server, server.connect() as connection:
        assert connect(connection) is connection


def test_an_address_leads_to_its_server() -> None:
    core = ServerCore()
    with grpc.serve(serving(core), "127.0.0.1:0") as server, connect(f"grpc://{server.address}") as connection:
        connection.send(pack(Join(rank=0, plan=make_plan(1))))
        assert connection.receive(30) is not None
    assert core.plan == make_plan(1)


def test_nobody_there_is_said_with_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # taken and not listening: nobody else can answer there
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(DeadlineError, match=address):
            connect(f"grpc://{address}", connect_timeout_s=0.3)
