"""A driver on connections: it waits, it gives up in time, and it says why a session ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from thinwire.codecs import codec
from thinwire.errors import DeadlineError, TransportError
from thinwire.packets import kind_of, pack
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.serving import serving
from thinwire.schema import Join, Leave, Message, Offer, Plan, Refused, TableSpec, Values, Welcome
from thinwire.server.core import ServerCore
from thinwire.telemetry import Counters
from thinwire.transports.base import Connection, Sender, Server
from thinwire.transports.grpc import client as grpc_client
from thinwire.transports.grpc import server as grpc_server
from thinwire.transports.memory import MemoryServer
from thinwire.worker.apply_buffer import Update
from thinwire.worker.conversation import Conversation

PLAIN = codec("fp32")
VALUES = np.arange(4, dtype=np.float32)


def make_plan(workers: int = 1) -> Plan:
    tables = (TableSpec(name="w", shape=(4,)), TableSpec(name="b", shape=(4,)))
    return Plan(workers=workers, tables=tables, codecs=(PLAIN.config(),), optimizer="SGD", groups=({},))


Serve = Callable[[ServerCore], tuple[Server, Callable[[], Connection]]]


@pytest.fixture(params=["memory", "grpc"])
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    servers: list[Server] = []

    def start(core: ServerCore) -> tuple[Server, Callable[[], Connection]]:
        if request.param == "memory":
            memory = MemoryServer(serving(core))
            servers.append(memory)
            return memory, memory.connect
        server = grpc_server.serve(serving(core), "127.0.0.1:0")
        servers.append(server)
        return server, lambda: grpc_client.connect(server.address)

    yield start
    for server in servers:
        server.stop()


class Script:
    """A server that lets a worker in at step 0, answers its next packet with some messages, and is silent then."""

    def __init__(self, *messages: Message | None) -> None:
        self.messages = messages
        self.heard: list[bytes] = []

    def __call__(self, sender: Sender) -> Script:
        self.sender = sender
        return self

    def opened(self, peer: int) -> None:
        pass

    def received(self, peer: int, packet: bytes) -> None:
        if kind_of(packet) is Join:
            if self.messages:
                self.sender.send(peer, pack(Offer(steps=(0,), held=(0,))))
            return
        self.heard.append(packet)
        if len(self.heard) == 1:
            for message in self.messages:
                if message is None or isinstance(message, Refused):
                    self.sender.close(peer, None if message is None else pack(message))
                else:
                    frames = tuple(b"" for _ in getattr(message, "tables", ()))
                    self.sender.send(peer, pack(message, frames))

    def closed(self, peer: int, error: str | None) -> None:
        pass


@dataclass
class Session:
    """One worker's conversation with one shard, and what runs it."""

    connection: Connection
    rank: int = 0
    workers: int = 1
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        self.counters = Counters()
        self.conversation = Conversation(0, make_plan(self.workers), rank=self.rank)
        self.driver = WorkerDriver(
            [self.conversation], [self.connection], timeout_s=self.timeout_s, counters=self.counters
        )
        self.clock = 0

    def join(self) -> bool:
        self.driver.run(self.conversation.join())
        self.driver.run(self.conversation.offered())
        self.driver.run(self.conversation.resume(0))
        return self.driver.run(self.conversation.welcomed()).send_values

    def push_all(self, value: float) -> None:
        for table in (0, 1):
            assert not self.conversation.push(self.clock, table, PLAIN.encode(np.full(4, value, np.float32)))
        self.driver.run(self.conversation.flush(self.clock, (0.5,)))
        self.conversation.transmit.end_step()
        self.clock += 1

    def pull(self, table: int) -> list[Update]:
        return self.driver.run(self.conversation.pull(table, self.clock))

    def ended(self) -> bool:
        return self.driver.run(self.conversation.ended(self.clock))


def scripted(*messages: Message | None, timeout_s: float = 30.0) -> Session:
    return Session(MemoryServer(Script(*messages), address="memory://here").connect(), timeout_s=timeout_s)


def test_a_whole_conversation(serve: Serve) -> None:
    core = ServerCore()
    _, connect = serve(core)
    session = Session(connect())
    assert session.join(), "the first worker is asked for the values"
    session.driver.run(session.conversation.send_values((PLAIN.encode(VALUES), PLAIN.encode(VALUES))))
    session.push_all(1.0)
    assert [update.version for update in session.pull(0)] == [1]
    assert not session.ended()
    assert [update.version for update in session.pull(1)] == [1]
    sent, received = session.driver.wire_nbytes
    assert sent > 4 * 16 and received > 2 * 16
    assert session.counters["wait_seconds"] >= 0
    session.driver.close()
    assert core.finished and core.failed is None
    np.testing.assert_array_equal(core.tables[0].values.numpy(), VALUES - 0.5)


def test_a_deadline_names_what_was_waited_for() -> None:
    session = scripted(Welcome(send_values=False), timeout_s=0.05)
    session.join()
    with pytest.raises(DeadlineError, match=r"memory://here: waited 0\.05 s for 'b' of step 0"):
        session.pull(1)
    with pytest.raises(DeadlineError, match="`timeout_s` sets how long to wait"):
        session.pull(0)
    assert session.counters["wait_seconds"] > 0.05
    with pytest.raises(DeadlineError, match=r"memory://here: waited 0.02 s for the other workers"):
        scripted(timeout_s=0.02).join()


def test_servers_that_end_the_session_or_go_away_are_named(serve: Serve) -> None:
    server, connect = serve(ServerCore())
    session = Session(connect(), rank=1, workers=2)
    session.driver.run(session.conversation.join())
    server.stop(grace_s=0)
    address = server.address.removeprefix("grpc://")
    with pytest.raises(TransportError, match=address):
        session.pull(0)
    session.driver.close()
    for table, name in enumerate("wb"):
        session = scripted(Welcome(send_values=False), Values(tables=(0, 1), versions=(0, 0)), None)
        session.join()
        assert session.pull(table) == [Update(0, b"", True)]
        session.clock += 1
        with pytest.raises(TransportError, match=f"memory://here: .*'{name}' of step 1"):
            session.pull(table)
        session.driver.close()


def test_a_failing_worker_says_goodbye_to_all_shards() -> None:
    silent, other = Script(), Script(None)
    stranger = Script(None)
    conversations = [Conversation(shard, make_plan(), rank=0) for shard in range(3)]
    for conversation in conversations[:2]:
        conversation.joined = True
    connections = [MemoryServer(script).connect() for script in (silent, other, stranger)]
    driver = WorkerDriver(conversations, connections, timeout_s=600)
    driver.close(within_s=0.1)
    assert [kind_of(packet) for packet in silent.heard + other.heard] == [Leave, Leave]
    assert not stranger.heard, "this worker has not joined it"
    driver.close(within_s=0.1)  # they are closed
