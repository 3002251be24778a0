"""What a message costs, worked out from clocks that say what they are told, and exchanged in a real session."""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable

import pytest

from thinwire.engines.events import Event, Listening
from thinwire.engines.roles import Roles
from thinwire.planner.transport_costs import TransportCosts
from thinwire.runtime import session_server
from thinwire.transports.grpc import GrpcOptions
from thinwire_lab.bench import transport_costs
from thinwire_lab.bench.roles import Stage
from thinwire_lab.bench.transport_costs import EchoServer, EchoWorker, Measured, measure_costs
from thinwire_lab.jobs.cluster import Links, Place, choose_links


class FakeEcho:
    """A connection to an echo, and the clock: 1 ms a message at the worker, 2 ms at the server, and 1 µs a byte."""

    def __init__(self) -> None:
        self.packet = b""
        self.worker_s = self.server_s = self.wall_s = 0.0

    def __enter__(self) -> FakeEcho:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self, packet: bytes) -> None:
        self.packet = packet

    def receive(self, timeout_s: float) -> bytes:
        if self.packet == transport_costs._ASK:
            return struct.pack("<d", self.server_s)
        self.worker_s += 2 * (1e-3 + 1e-6 * len(self.packet))
        self.server_s += 2 * (2e-3 + 1e-6 * len(self.packet))
        self.wall_s += 10e-3
        return self.packet

    def process_time(self) -> float:
        return self.worker_s

    def perf_counter(self) -> float:
        return self.wall_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds


def test_messages_and_bytes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    echo, reported = FakeEcho(), list[Event]()
    monkeypatch.setattr(transport_costs, "time", echo)
    monkeypatch.setattr(transport_costs, "connect", lambda address, **options: echo)
    EchoWorker(server="grpc://anywhere").play(Stage(reported.append, "", GrpcOptions()))
    [event] = reported
    assert isinstance(event, Measured)
    costs = event.costs
    assert costs.byte_s == pytest.approx(1e-6, rel=0.05)
    assert costs.worker_message_s == pytest.approx(1e-3, rel=0.1)
    assert costs.server_message_s == pytest.approx(2e-3, rel=0.1)
    assert costs.latency_s == pytest.approx(5e-3 - costs.server_message_s)


def test_packets_are_exchanged_in_a_session_as_trainings_do(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    accept = session_server.SessionServer._open

    def open_session(self: session_server.SessionServer, peer: int, message: object) -> None:
        opened.append(message)
        accept(self, peer, message)  # type: ignore[arg-type]

    monkeypatch.setattr(session_server.SessionServer, "_open", open_session)
    monkeypatch.setattr(transport_costs, "_SMALL_COUNT", 70)  # beyond 64, which are acknowledged
    monkeypatch.setattr(transport_costs, "PAUSE_S", 0.0)
    listening: queue.Queue[Event] = queue.Queue()
    stage = Stage(listening.put, "127.0.0.1:0", GrpcOptions())
    server = threading.Thread(target=EchoServer().play, args=(stage,), daemon=True)
    server.start()
    address = listening.get(timeout=60)
    assert isinstance(address, Listening)
    reported: list[Event] = []
    EchoWorker(server=f"grpc://{address.address}", large=3).play(Stage(reported.append, "", GrpcOptions()))
    server.join(60)
    assert not server.is_alive() and len(opened) == 1
    [event] = reported
    assert isinstance(event, Measured) and event.costs.worker_message_s > 0 and event.costs.server_message_s > 0


def test_messages_are_measured_behind_the_links_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Links, list[str]]] = []

    def run_cluster(roles: Roles, place: Place, kinds: object, on_event: Callable[[str, Event], None]) -> None:
        command = roles.worker(0, ["10.0.0.1:7"], False)
        assert isinstance(command, list)
        made.append((place.links, command))
        on_event("worker 0", Measured(costs=TransportCosts(latency_s=4.0)))

    monkeypatch.setattr(transport_costs, "run_cluster", run_cluster)
    for link, packets in ((None, 60), ("100mbit", 60), ("10mbit", 8)):
        assert measure_costs(choose_links(link, "application")).latency_s == 4.0
        links, command = made.pop()
        assert str(links.rate) == (link or "none") and f'"large":{packets}' in command[-1]
