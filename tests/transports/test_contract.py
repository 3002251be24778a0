"""One checklist that every transport passes: what the runtime may rely on, whatever carries its packets."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from functools import partial

import pytest

from tests.transports.conftest import Cluster, Idle
from thinwire.errors import ConfigError, DeadlineError, TransportError
from thinwire.transports.base import Sender, wire_nbytes
from thinwire.transports.memory import MemoryServer

WAIT_S = 20.0
# Around the places where a length prefix or an HTTP/2 frame takes another byte, or a packet another chunk.
SIZES = (1, 127, 128, 16_379, 16_380, 65_535, 2**20 - 1, 2**20, 2**20 + 1, 2**21)


def swallow(sender: Sender, peer: int, packet: bytes) -> None:
    """A server that never answers."""


def dismiss(sender: Sender, peer: int, packet: bytes) -> None:
    """A server that has two more things to say, and then ends the session."""
    sender.send(peer, b"answer")
    sender.close(peer, b"last")


def bytes_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


class TestPackets:
    def test_bytes_come_back_identical_in_order_and_are_counted(self, cluster: Cluster) -> None:
        recorder = cluster.serve()
        connections = [cluster.connect() for _ in range(2)]
        packets = [*map(bytes_of, SIZES), *(bytes_of(1 + number * 37 % 5000) for number in range(200))]
        for connection in connections:
            for packet in packets:
                connection.send(packet)
        total = sum(map(wire_nbytes, packets))
        for peer, connection in enumerate(connections):
            assert [connection.receive(WAIT_S) for _ in packets] == packets
            assert connection.bytes_sent == connection.bytes_received == total
            assert recorder.packets(peer) == packets
        assert recorder.server.bytes_sent == recorder.server.bytes_received == 2 * total

    def test_an_empty_packet_is_refused_on_both_sides(self, cluster: Cluster) -> None:
        refused: list[str] = []

        def answer_nothing(sender: Sender, peer: int, packet: bytes) -> None:
            try:
                sender.send(peer, b"")
            except ConfigError as error:
                refused.append(str(error))
            sender.send(peer, packet)

        cluster.serve(answer_nothing)
        connection = cluster.connect()
        with pytest.raises(ConfigError, match="an empty packet cannot be sent"):
            connection.send(b"")
        connection.send(b"1")
        assert connection.receive(WAIT_S) == b"1" and len(refused) == 1

    def test_threads_may_send_at_the_same_time(self, cluster: Cluster) -> None:
        recorder = cluster.serve(swallow)
        connection = cluster.connect()

        def send(thread: int) -> None:
            for number in range(50):
                connection.send(bytes([thread, number]) + bytes(number * 100))

        threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        connection.close()
        assert recorder.wait_closed() is None
        for kind in range(4):
            numbers = [packet[1] for packet in recorder.packets() if packet[0] == kind]
            assert numbers == list(range(50))

    def test_one_packet_is_shared_by_all_peers(self, cluster: Cluster) -> None:
        shared = bytes_of(100_000)

        def broadcast(sender: Sender, peer: int, packet: bytes) -> None:
            for other in range(3):
                sender.send(other, shared)

        cluster.serve(broadcast)
        connections = [cluster.connect() for _ in range(3)]
        connections[2].send(b"1")
        for connection in connections:
            assert connection.receive(WAIT_S) == shared
            assert connection.bytes_received == wire_nbytes(shared)
        assert cluster.server.bytes_sent == 3 * wire_nbytes(shared)


class TestSessions:
    def test_peers_are_numbered_as_they_come_and_closed_once(self, cluster: Cluster) -> None:
        recorder = cluster.serve(dismiss)
        for _ in range(3):
            connection = cluster.connect()
            connection.send(b"1")
            connection.close()
        assert recorder.wait_closed(2) is None
        cluster.server.stop()
        for kind in ("opened", "closed"):
            assert sorted(event[1] for event in recorder.events if event[0] == kind) == [0, 1, 2]

    def test_worker_close_delivers_sent_packets(self, cluster: Cluster) -> None:
        recorder = cluster.serve()
        connection = cluster.connect()
        packets = [bytes_of(30_000 + number) for number in range(30)]
        for packet in packets:
            connection.send(packet)
        connection.close()
        connection.close()
        assert recorder.wait_closed() is None
        assert recorder.packets() == packets
        with pytest.raises(TransportError, match="this end has closed the session"):
            connection.send(packets[0])
        with pytest.raises(TransportError, match="this end has closed the session"):
            connection.receive(WAIT_S)

    def test_server_close_delivers_pending_packets(self, cluster: Cluster) -> None:
        recorder = cluster.serve(dismiss)
        connection = cluster.connect()
        connection.send(b"1")
        assert connection.receive(WAIT_S) == b"answer"
        assert connection.receive(WAIT_S) == b"last"
        assert connection.receive(WAIT_S) is None
        assert connection.receive(WAIT_S) is None
        assert recorder.wait_closed() is None
        with pytest.raises(TransportError, match="has ended"):
            connection.send(b"1")
        connection.close()

    def test_no_packet_is_delivered_after_the_handler_closed_the_session(self, cluster: Cluster) -> None:
        recorder = cluster.serve(dismiss)
        connection = cluster.connect()
        connection.send(b"1")
        assert recorder.wait_closed() is None
        with contextlib.suppress(TransportError):  # our end may not have heard of it yet
            connection.send(b"1")
        cluster.server.stop()
        assert recorder.packets() == [b"1"]

    def test_a_packet_to_a_peer_that_left_is_ignored(self, cluster: Cluster) -> None:
        def to_the_first(sender: Sender, peer: int, packet: bytes) -> None:
            sender.send(0, packet)
            sender.close(0)
            sender.send(peer, packet)

        recorder = cluster.serve(to_the_first)
        leaving, staying = cluster.connect(), cluster.connect()
        leaving.close()
        assert recorder.wait_closed(0) is None
        staying.send(b"1")
        assert staying.receive(WAIT_S) == b"1"
        assert cluster.server.bytes_sent == wire_nbytes(b"1")

    def test_call_runs_between_calls_of_the_handler(self, cluster: Cluster) -> None:
        recorder = cluster.serve()
        connection = cluster.connect()
        ran = threading.Event()

        def tick() -> None:
            recorder.sender.send(0, b"77")
            ran.set()

        recorder.sender.call(tick)
        assert ran.wait(WAIT_S)
        assert connection.receive(WAIT_S) == b"77"
        cluster.server.stop()
        recorder.sender.call(lambda: pytest.fail("the server has stopped"))

    def test_no_session_begins_with_a_memory_server_that_has_stopped(self) -> None:
        server = MemoryServer(Idle)
        server.stop()
        with pytest.raises(TransportError, match="it has stopped"):
            server.connect()


class TestDeadlines:
    def test_receive_timeout_raises_and_the_session_continues(self, cluster: Cluster) -> None:
        recorder = cluster.serve()
        connection = cluster.connect()
        for timeout_s in (0, 0.02):
            with pytest.raises(DeadlineError, match=rf"nothing came from .* within {timeout_s} s"):
                connection.receive(timeout_s)
        later = threading.Timer(0.05, recorder.sender.call, [lambda: recorder.sender.send(0, b"5")])
        later.start()
        assert connection.receive(None) == b"5", "no deadline waits for what comes"
        later.join()


class TestCrashes:
    def test_crashed_worker_closes_with_an_error(self, cluster: Cluster) -> None:
        recorder = cluster.serve()
        connection = cluster.connect()
        connection.send(b"1")
        assert connection.receive(WAIT_S) is not None
        connection.abort()
        assert "went away" in (recorder.wait_closed() or "")
        with pytest.raises(TransportError, match="this end has closed"):
            connection.send(b"1")
        with contextlib.suppress(KeyError), cluster.connect():
            raise KeyError("training failed")
        assert recorder.wait_closed(1) is not None

    def test_server_stop_ends_sessions_without_error(self, cluster: Cluster) -> None:
        recorder = cluster.serve(swallow)
        connection = cluster.connect()
        packets = [bytes_of(50_000 + number) for number in range(5)]
        for packet in packets:
            recorder.sender.call(partial(recorder.sender.send, 0, packet))
        assert cluster.server.wait(timeout_s=0) is False
        cluster.server.stop()
        cluster.server.stop()
        assert [connection.receive(WAIT_S) for _ in packets] == packets
        assert connection.receive(WAIT_S) is None
        assert recorder.wait_closed() is None
        assert cluster.server.wait(WAIT_S) is True

    def test_server_stop_without_grace_breaks_sessions(self, cluster: Cluster) -> None:
        recorder = cluster.serve(swallow)
        connection = cluster.connect()
        connection.send(bytes(100_000))
        recorder.wait(recorder.packets)
        stopper = threading.Timer(0.05, cluster.server.stop, [0])
        stopper.start()
        for _ in range(2):  # it wakes a receiver that waits, and is latched
            with pytest.raises(TransportError, match=cluster.server.address):
                connection.receive(None)
        with pytest.raises(TransportError, match=cluster.server.address):
            connection.send(b"1")
        connection.close()
        stopper.join()
        assert recorder.wait_closed() is not None

    def test_failing_handler_stops_the_server(self, cluster: Cluster) -> None:
        def fail(sender: Sender, peer: int, packet: bytes) -> None:
            raise ArithmeticError("a bug in the handler")

        recorder = cluster.serve(fail)
        culprit, bystander = cluster.connect(), cluster.connect()
        culprit.send(b"1")
        for connection in (culprit, bystander):
            with pytest.raises(TransportError, match="ArithmeticError: a bug in the handler"):
                connection.receive(WAIT_S)
        with pytest.raises(ArithmeticError, match="a bug in the handler"):
            cluster.server.wait(WAIT_S)
        assert [event[0] for event in recorder.events] == ["opened", "opened", "received"]


class TestLimits:
    def test_packets_over_the_limit_are_refused_at_both_ends_before_they_are_sent(self, cluster: Cluster) -> None:
        refused: list[str] = []

        def answer_too_much(sender: Sender, peer: int, packet: bytes) -> None:
            try:
                sender.send(peer, bytes(2000))
            except TransportError as error:
                refused.append(str(error))
                sender.send(peer, packet)

        cluster.serve(answer_too_much, max_message_nbytes=1000)
        connection = cluster.connect()
        fits = bytes(1000)
        connection.send(fits)
        with pytest.raises(TransportError, match=r"1001 bytes .* limit of 1000 bytes.*max_message_nbytes"):
            connection.send(bytes(1001))
        assert connection.receive(WAIT_S) == fits
        assert connection.bytes_sent == wire_nbytes(fits)
        assert len(refused) == 1 and "limit of 1000 bytes" in refused[0]

    def test_packet_limit_of_one_peer_ends_its_session(self, cluster: Cluster) -> None:
        exceeded: list[int] = []

        def end(sender: Sender) -> None:
            exceeded.append(0)
            sender.close(0, b"too much")

        def limit(sender: Sender, peer: int, packet: bytes) -> None:
            if peer == 0:
                sender.limit(0, 3 * 2**20, partial(end, sender))
            sender.send(peer, packet[:1])

        recorder = cluster.serve(limit)
        greedy, other = cluster.connect(), cluster.connect()
        for size in (1, 3 * 2**20):
            greedy.send(bytes(size))
            assert greedy.receive(WAIT_S) == b"\0"
        greedy.send(bytes(20 * 2**20))
        assert greedy.receive(WAIT_S) == b"too much" and greedy.receive(WAIT_S) is None
        assert exceeded == [0] and len(recorder.packets(0)) == 2
        other.send(bytes(20 * 2**20))
        assert other.receive(WAIT_S) == b"\0"

    def test_a_peer_that_does_not_read_loses_its_session(self, cluster: Cluster) -> None:
        def flood(sender: Sender, peer: int, packet: bytes) -> None:
            for _ in range(1 if packet == b"1" else 5):
                sender.send(peer, bytes(400_000))

        recorder = cluster.serve(flood, max_pending_nbytes=1_000_000)
        slow, other = cluster.connect(), cluster.connect()
        slow.send(b"2")
        assert recorder.wait_closed(0) is not None
        with pytest.raises(TransportError, match="does not read: over 1000000 bytes pending"):
            deque(iter(lambda: slow.receive(WAIT_S), None))
        other.send(b"1")
        assert other.receive(WAIT_S) is not None

    def test_pending_limit_of_a_peer_is_raised_by_the_handler(self, cluster: Cluster) -> None:
        def flood(sender: Sender, peer: int, packet: bytes) -> None:
            sender.limit(peer, 1000, lambda: None, 2_100_000)
            sender.limit(peer, 1000, lambda: None, 1000)  # never less than before
            for _ in range(5):
                sender.send(peer, bytes(400_000))

        cluster.serve(flood, max_pending_nbytes=1_000_000)
        connection = cluster.connect()
        connection.send(b"1")
        assert [connection.receive(WAIT_S) for _ in range(5)] == [bytes(400_000)] * 5
        cluster.server.stop(grace_s=0)
        cluster.serve(max_pending_nbytes=1000)  # one packet may be larger than that
        connection = cluster.connect()
        for _ in range(30):
            connection.send(bytes(5000))
            assert connection.receive(WAIT_S) is not None

    @pytest.mark.parametrize("cluster", ["grpc"], indirect=True)
    def test_unreceived_packets_wait_at_the_server(self, cluster: Cluster) -> None:
        def flood(sender: Sender, peer: int, packet: bytes) -> None:
            for number in range(40):
                sender.send(peer, bytes([number]) * 1_000_000)

        cluster.serve(flood)
        cluster.options = {"max_pending_nbytes": 2_000_000}
        connection = cluster.connect()
        connection.send(b"1")
        assert connection.receive(WAIT_S) == bytes(1_000_000)
        time.sleep(0.2)  # time for all that it may take, and more
        assert connection.bytes_received <= 4 * wire_nbytes(bytes(1_000_000))
        assert [(connection.receive(WAIT_S) or b"")[0] for _ in range(39)] == list(range(1, 40))
