"""What a message costs, worked out from clocks that say what they are told, and exchanged in a real session."""

from __future__ import annotations

import queue
import struct
import threading

import pytest

from thinwire.engines.events import Event, Listening
from thinwire.transports.grpc import GrpcOptions
from thinwire_lab.bench import transport_costs
from thinwire_lab.bench.roles import Stage
from thinwire_lab.bench.transport_costs import EchoServer, EchoWorker, Measured


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
    [costs] = reported
    assert isinstance(costs, Measured)
    assert costs.byte_s == pytest.approx(1e-6, rel=0.05)
    assert costs.worker_message_s == pytest.approx(1e-3, rel=0.1)
    assert costs.server_message_s == pytest.approx(2e-3, rel=0.1)
    assert costs.latency_s == pytest.approx(5e-3 - costs.server_message_s)


def test_packets_are_exchanged_in_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
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
    [costs] = reported
    assert isinstance(costs, Measured) and costs.worker_message_s > 0 and costs.server_message_s > 0
