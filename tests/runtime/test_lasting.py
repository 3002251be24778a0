"""Sessions that outlive their connections: every message once, in order, whatever breaks when."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest

from tests.packets.bytes_of import packet
from thinwire.errors import ProtocolError, TransportError
from thinwire.packets import kind_of, pack
from thinwire.runtime import lane as lane_module
from thinwire.runtime import lasting as lasting_module
from thinwire.runtime.lane import Lane
from thinwire.runtime.lasting import lasting
from thinwire.runtime.reconnecting import Reconnecting
from thinwire.schema import Leave, Open, Refused
from thinwire.transports.base import Connection, Sender, wire_nbytes
from thinwire.transports.memory import MemoryServer


def numbered(number: int) -> bytes:
    """A packet that the handler of these tests understands: the number as text."""
    return packet(kind=200, message=str(number).encode(), frames=())


def number_in(data: bytes) -> int:
    return int(data[20:])


class Echo:
    """Answers message n with messages 2n and 2n + 1, and writes everything down."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.heard: list[int] = []
        self.ends: list[tuple[int, str | None]] = []

    def opened(self, peer: int) -> None:
        pass

    def received(self, peer: int, data: bytes) -> None:
        if data == pack(Leave()):
            self.sender.close(peer)
            return
        number = number_in(data)
        self.heard.append(number)
        for answer in (2 * number, 2 * number + 1):
            self.sender.send(peer, numbered(answer))

    def closed(self, peer: int, error: str | None) -> None:
        self.ends.append((peer, error))


class Cluster:
    def __init__(self, grace_s: float = 30.0) -> None:
        self.echo: Echo

        def make(sender: Sender) -> Echo:
            self.echo = Echo(sender)
            return self.echo

        self.server = MemoryServer(lasting(make, grace_s))
        self.connections: list[Connection] = []

    def connect(self, _timeout_s: float) -> Connection:
        self.connections.append(self.server.connect())
        return self.connections[-1]

    def worker(self, reconnect_s: float = 30.0) -> Reconnecting:
        return Reconnecting(self.connect, connect_timeout_s=1, reconnect_s=reconnect_s)

    def cut(self) -> None:
        """The server's side ends with an error, and the worker's inbox is lost."""
        connection = self.connections[-1]
        self.server.post(lambda: self.server.end(connection.peer, "cut"))  # type: ignore[attr-defined]


def number_of(data: bytes | None) -> int:
    assert data is not None
    return number_in(data)


def drain(worker: Reconnecting) -> None:
    while True:
        worker.receive(5)


@pytest.mark.parametrize("seed", range(8))
def test_every_message_once_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "HEARD_MESSAGES", 5)
    chance, cluster = random.Random(seed), Cluster()
    worker = cluster.worker()
    came: list[int] = []
    for number in range(60):
        worker.send(numbered(number))
        while len(came) < 2 * number and chance.random() < 0.7:
            came.append(number_of(worker.receive(5)))
        if chance.random() < 0.2:
            cluster.cut()
    while len(came) < 120:
        came.append(number_of(worker.receive(5)))
    assert cluster.echo.heard == list(range(60)) and came == list(range(120))
    assert worker.reconnections > 3 and cluster.echo.ends == []
    assert worker._lane.kept_nbytes < 8 * wire_nbytes(numbered(59)), "what was heard is forgotten"
    worker.send(pack(Leave()))
    assert worker.receive(5) is None
    worker.close()
    assert cluster.echo.ends == [(0, None)]


def test_a_cut_after_the_last_word_does_not_lose_it() -> None:
    cluster = Cluster()
    worker = cluster.worker()
    worker.send(numbered(1))
    cluster.server.post(lambda: cluster.echo.sender.close(0, pack(Refused(reason="enough"))))
    cluster.connections[-1].abort()
    with pytest.raises((ProtocolError, TransportError), match="enough"):
        worker.send(numbered(2))
    with pytest.raises(TransportError, match="enough"):
        worker.receive(1)


def test_without_grace_a_break_is_the_end_at_once() -> None:
    cluster = Cluster(grace_s=0)
    worker = cluster.worker()
    worker.send(numbered(1))
    assert number_of(worker.receive(5)) == 2
    cluster.cut()
    assert number_of(worker.receive(5)) == 3
    with pytest.raises(TransportError, match="cut"):
        worker.receive(5)
    assert cluster.echo.ends == [(0, "cut")] and worker.reconnections == 0


def test_the_handler_hears_of_one_that_does_not_come_back() -> None:
    cluster = Cluster(grace_s=0.05)
    worker = cluster.worker()
    worker.send(numbered(1))
    cluster.cut()
    while not cluster.echo.ends:
        time.sleep(0.01)
    assert cluster.echo.ends == [(0, "cut; it did not come back within 0.05 s")]
    assert number_of(worker.receive(5)) == 2  # it had come before the cut
    assert number_of(worker.receive(5)) == 3
    with pytest.raises(ProtocolError, match="does not know the session: it was restarted, or it no longer waited"):
        worker.receive(5)


def test_a_server_that_was_restarted_refuses_who_is_ahead_of_it() -> None:
    cluster, restarted = Cluster(), Cluster()
    worker = cluster.worker()
    worker.send(numbered(1))
    worker.receive(5)
    worker._connect = restarted.connect
    cluster.server.stop(grace_s=0)
    with pytest.raises(ProtocolError, match="Resume all workers and shards from checkpoints of one step"):
        drain(worker)
    assert restarted.echo.heard == []


def test_patience_ends_with_both_reasons() -> None:
    cluster = Cluster()
    worker = cluster.worker(reconnect_s=0.2)
    cluster.server.stop(grace_s=0)
    with pytest.raises(TransportError, match=r"went away; no way back to memory within 0.2 s: no server at memory"):
        drain(worker)
    with pytest.raises(TransportError, match="no way back"):
        worker.send(numbered(1))


def test_a_server_that_comes_back_in_time_is_found() -> None:
    cluster = Cluster()
    worker, refusals = cluster.worker(), [TransportError("not yet"), TransportError("not yet")]

    def connect(timeout_s: float) -> Connection:
        if refusals:
            raise refusals.pop()
        return cluster.connect(timeout_s)

    worker._connect = connect
    cluster.cut()
    worker.send(numbered(1))
    assert [number_of(worker.receive(5)) for _ in range(2)] == [2, 3] and not refusals


def test_two_threads_mend_one_break_once() -> None:
    cluster = Cluster()
    worker = cluster.worker()
    worker.send(numbered(0))
    assert [number_of(worker.receive(5)) for _ in range(2)] == [0, 1]
    came: list[int] = []
    reader = threading.Thread(target=lambda: came.extend(number_of(worker.receive(10)) for _ in range(2)))
    reader.start()
    cluster.cut()
    worker.send(numbered(1))
    reader.join(10)
    assert came == [2, 3] and worker.reconnections == 1


def test_peers_that_do_not_ask_are_told_of_at_once_and_lies_are_refused() -> None:
    cluster = Cluster()
    plain = cluster.connect(1)
    plain.send(numbered(4))
    assert number_of(plain.receive(1)) == 8
    plain.abort()
    assert cluster.echo.ends == [(0, "the peer went away without saying so")]
    for said in (Open(session=""), Open(session="x" * 65), Open(session="new", heard=3)):
        liar = cluster.connect(1)
        liar.send(pack(said))
        answer = liar.receive(1)
        assert answer is not None and kind_of(answer) is Refused
        assert liar.receive(1) is None


def test_who_never_says_what_it_heard_does_not_fill_the_servers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_module, "MAX_KEPT_NBYTES", 10 * wire_nbytes(numbered(10)))
    cluster = Cluster()
    silent = cluster.connect(1)
    silent.send(pack(Open(session="silent")))
    with contextlib.suppress(TransportError):  # the session may be over before all is said
        for number in range(10, 20):
            silent.send(numbered(number))
    last = None
    while (answer := silent.receive(5)) is not None:
        last = answer
    assert last is not None and kind_of(last) is Refused
    assert b"has not said that it heard" in last
    [(peer, error)] = cluster.echo.ends
    assert peer == 0 and error is not None and "has not said that it heard" in error
    worker = cluster.worker()  # others go on
    worker.send(numbered(1))
    assert number_of(worker.receive(5)) == 2


def test_a_lane_knows_what_cannot_be() -> None:
    lane = Lane()
    lane.say(numbered(0))
    lane.acknowledge(1)
    for count in (0, 2, -1):
        with pytest.raises(ProtocolError, match=f"has heard {count} messages; between 1 and 1 are possible"):
            lane.acknowledge(count)
    assert lane.kept_nbytes == 0 and lane.unheard == ()
