"""What messages and shared processors cost: worked out from clocks that tests move, and measured for real."""

from __future__ import annotations

import queue
import struct
import threading

import pytest

from thinwire.engines.events import Event, Listening
from thinwire.errors import EngineError
from thinwire.planner.transport_costs import Sharing
from thinwire.runtime import session_server
from thinwire.transports.grpc import GrpcOptions
from thinwire_lab.bench import transport_costs
from thinwire_lab.bench.peer_costs import Trained, measure_peer_costs, measure_sharing, measured, sharing_of
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


def test_a_message_takes_some_microseconds_of_a_processor_and_a_ring_waits_at_its_hops() -> None:
    """How long is the machine's; that it is not negative where noise is larger, and no mistake of units, is ours."""
    costs = measure_peer_costs(ranks=3)
    assert 1e-6 < costs.message_s < 0.05 and 0.0 <= costs.hop_s < 0.05
    assert measured([0.002, 0.002, 0.001], [0.005, 0.006, 0.002], 3, 2)[1] == 0.0
    assert measured([0.002, 0.002, 0.001], [0.006, 0.005, 0.002], 3, 2)[1] == pytest.approx(0.0005)


def trained(alone_s: float | None, beside_s: float, used_s: float, lasted_s: float) -> Trained:
    return Trained(alone_s=alone_s, beside_s=beside_s, used_s=used_s, lasted_s=lasted_s)


def test_two_processes_train_side_by_side() -> None:
    found = measure_sharing("mlp", "digits", ranks=2)
    assert 1.0 <= found.slowdown < 5.0 and 0.05 < found.use <= 1.0


def test_steps_of_all_make_the_figures() -> None:
    four = [
        trained(0.004, 0.005, 0.006, 0.016),
        *(trained(None, seconds, 0.006, 0.016) for seconds in (5e-3, 6e-3, 6e-3)),
    ]
    assert sharing_of(four, 2) == Sharing(slowdown=1.375, use=0.75)
    assert sharing_of(four, 4) == Sharing(slowdown=1.375, use=0.375), "processors that nobody needs are not in use"
    lucky = [trained(0.004, 0.0039, 0.006, 0.0059), trained(None, 0.0039, 0.006, 0.0059)]
    assert sharing_of(lucky, 2) == Sharing(), "noise never makes company a help, nor more than all in use"


def test_processes_that_fail_are_told() -> None:
    with pytest.raises(EngineError, match="nothing"):
        measure_sharing("nothing", "digits", ranks=2)
