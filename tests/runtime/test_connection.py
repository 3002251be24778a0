"""A worker's connection: forms of an address, and sessions that deliver every message once despite breaks."""

from __future__ import annotations

import itertools
import math
import random
import threading

import pytest

from tests.runtime.sessions import Cluster, number_in, numbered
from tests.server.conversation import make_plan
from thinwire.errors import ConfigError, DeadlineError, ProtocolError, TransportError
from thinwire.packets import pack
from thinwire.runtime import session
from thinwire.runtime.connection import ReconnectingConnection, connect, connect_all
from thinwire.runtime.serving import serving
from thinwire.schema import Join, Leave, Refused
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection, wire_nbytes
from thinwire.transports.grpc import server as grpc_server
from thinwire.transports.memory import MemoryServer

# ---- addresses


def test_invalid_addresses_and_durations_raise_config_error() -> None:
    for address in ("127.0.0.1:7070", "http://127.0.0.1:7070", "grpc://", "://x:1", "", "grpc:/x:7070"):
        with pytest.raises(ConfigError, match="expected grpc://host:port") as caught:
            connect(address)
        assert repr(address) in str(caught.value)
    for address in ("grpc://nohost", "grpc://127.0.0.1:port", "grpc://127.0.0.1:99999", "grpc://h:0"):
        with pytest.raises(ConfigError, match=address.removeprefix("grpc://")):
            connect(address, connect_timeout_s=1)
    for option, seconds in itertools.product(("connect_timeout_s", "reconnect_s"), (math.inf, math.nan, 1e10, -1.0)):
        with pytest.raises(ConfigError, match=f"{option} is .*; give 0 to 1000000 seconds"):
            connect("grpc://127.0.0.1:1", **{option: seconds})  # type: ignore[arg-type]


def test_connect_returns_connection_or_opens_address() -> None:
    with MemoryServer(serving(ServerCore())) as server, server.connect() as connection:
        assert connect(connection) is connection
    core = ServerCore()
    with grpc_server.serve(serving(core), "127.0.0.1:0") as there, connect(f"grpc://{there.address}") as connection:
        connection.send(pack(Join(rank=0, plan=make_plan(1))))
        assert connection.receive(30) is not None
        assert core.plan == make_plan(1)


def test_connect_all_unreachable_shard_closes_other_connections() -> None:
    with MemoryServer(serving(ServerCore())) as server:
        first = server.connect()
        with pytest.raises(DeadlineError):
            connect_all([first, "grpc://127.0.0.1:1", first], connect_timeout_s=0.1)
        with pytest.raises(TransportError):
            first.send(b"more")


# ---- connections that break


def drain(worker: ReconnectingConnection) -> None:
    while True:
        worker.receive(5)


def test_reconnecting_connection_delivers_messages_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ACKNOWLEDGE_MESSAGES", 5)
    for seed in range(8):
        chance, cluster = random.Random(seed), Cluster()
        worker = cluster.worker()
        came: list[int] = []
        for number in range(60):
            worker.send(numbered(number))
            while len(came) < 2 * number and chance.random() < 0.7:
                came.append(number_in(worker.receive(5)))
            if chance.random() < 0.2:
                cluster.cut()
        while len(came) < 120:
            came.append(number_in(worker.receive(5)))
        assert cluster.echo.received_numbers == list(range(60)) and came == list(range(120)), seed
        assert worker.reconnections > 3 and cluster.echo.ends == []
        assert worker._session.buffer.nbytes < 8 * wire_nbytes(numbered(59)), "what was acknowledged is forgotten"
        worker.send(pack(Leave()))
        assert worker.receive(5) is None
        worker.close()
        assert cluster.echo.ends == [(0, None)]


def test_reconnecting_connection_two_threads_replace_once() -> None:
    cluster = Cluster()
    worker = cluster.worker()
    worker.send(numbered(0))
    assert [number_in(worker.receive(5)) for _ in range(2)] == [0, 1]
    came: list[int] = []
    reader = threading.Thread(target=lambda: came.extend(number_in(worker.receive(10)) for _ in range(2)))
    reader.start()
    cluster.cut()
    worker.send(numbered(1))
    reader.join(10)
    assert came == [2, 3] and worker.reconnections == 1


def test_reconnecting_connection_keeps_last_packet_before_cut() -> None:
    cluster = Cluster()
    worker = cluster.worker()
    worker.send(numbered(1))
    cluster.server.post(lambda: cluster.echo.sender.close(0, pack(Refused(reason="enough"))))
    cluster.connections[-1].abort()
    with pytest.raises((ProtocolError, TransportError), match="enough"):
        worker.send(numbered(2))
    with pytest.raises(TransportError, match="enough"):
        worker.receive(1)


def test_restarted_server_refuses_unknown_session() -> None:
    cluster, restarted = Cluster(), Cluster()
    worker = cluster.worker()
    worker.send(numbered(1))
    worker.receive(5)
    worker._connect = restarted.connect
    cluster.server.stop(grace_s=0)
    with pytest.raises(ProtocolError, match="resume all workers and shards"):
        drain(worker)
    assert restarted.echo.received_numbers == []


def test_reconnecting_connection_waits_for_server_or_token_file() -> None:
    """A token file that is being replaced is read again."""
    cluster = Cluster()
    worker = cluster.worker()
    refusals = [TransportError("not yet"), ConfigError("token file 'token' cannot be read")]

    def connect(timeout_s: float) -> Connection:
        if refusals:
            raise refusals.pop()
        return cluster.connect(timeout_s)

    worker._connect = connect
    cluster.cut()
    worker.send(numbered(1))
    assert [number_in(worker.receive(5)) for _ in range(2)] == [2, 3] and not refusals
