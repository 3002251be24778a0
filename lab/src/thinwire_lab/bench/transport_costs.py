"""What a message over gRPC costs on this machine, for the computed clock: processor seconds at both ends, and latency.

A worker's connection and a server's echo exchange packets of two sizes, with a pause before each as training makes one:
a thread that has slept costs more to wake than a busy one. They meet as in a training: in a session that would outlive
its connection, and behind links of the training's rate, for what comes in many small packets costs more than what comes
over loopback. Processor seconds are the processes' own, so that other work on the machine hardly changes them; latency
is the median round trip's, and does change.
"""

from __future__ import annotations

import statistics
import struct
import threading
import time

from thinwire.engines.events import Event, Listening
from thinwire.engines.roles import Roles
from thinwire.errors import TransportError
from thinwire.planner.transport_costs import TransportCosts
from thinwire.runtime.connection import connect
from thinwire.runtime.limits import MAX_JOIN_NBYTES
from thinwire.runtime.session_server import SessionServer
from thinwire.transports.base import Connection, Sender
from thinwire.transports.grpc import server as grpc_server
from thinwire_lab.bench.roles import Role, Stage
from thinwire_lab.jobs.cluster import Links, Place, choose_links, run_cluster

SMALL_NBYTES, LARGE_NBYTES = 1_000, 400_000
PAUSE_S = 0.003
SESSION_S = 60.0
"""For how long either end would wait for the other, in seconds; any number above 0 makes a session."""
_SMALL_COUNT, _LARGE_COUNT, _LARGE_FEWEST = 200, 60, 8
_LARGE_WITHIN_S = 5.0
"""Of large packets there are as many as a thin link carries in this time, there and back."""
_WARMING = 3
_ASK = b"?"


class Measured(Event, frozen=True, kw_only=True):
    """What exchanges came to."""

    costs: TransportCosts


class EchoServer(Role, frozen=True, kw_only=True):
    """Sends every packet back until its one peer leaves."""

    def play(self, stage: Stage) -> None:
        """Serves and reports where."""
        ended = threading.Event()

        def handler(sender: Sender) -> SessionServer:
            return SessionServer(lambda sessions: Echo(sessions, ended), sender, SESSION_S)

        with grpc_server.serve(handler, stage.listen, options=stage.transport) as server:
            stage.report(Listening(address=server.address))
            ended.wait()


class EchoWorker(Role, frozen=True, kw_only=True):
    """Exchanges packets with an `EchoServer` and reports what they cost."""

    server: str
    large: int = _LARGE_COUNT

    def play(self, stage: Stage) -> None:
        """Exchanges small packets, then large ones."""
        with connect(self.server, reconnect_s=SESSION_S, options=stage.transport) as connection:
            worker_s, server_s, round_trip_s = _exchange(connection, SMALL_NBYTES, _SMALL_COUNT)
            large_worker_s, large_server_s, _ = _exchange(connection, LARGE_NBYTES, self.large)
        byte_s = (large_worker_s + large_server_s - worker_s - server_s) / 2 / (LARGE_NBYTES - SMALL_NBYTES)
        server_message_s = server_s - SMALL_NBYTES * byte_s
        costs = TransportCosts(
            worker_message_s=worker_s - SMALL_NBYTES * byte_s,
            server_message_s=server_message_s,
            byte_s=byte_s,
            latency_s=max(0.0, round_trip_s / 2 - server_message_s),
        )
        stage.report(Measured(costs=costs))


def measure_costs(links: Links | None = None) -> TransportCosts:
    """Returns what messages cost here; takes a few seconds."""
    measured: list[TransportCosts] = []

    def collect(process: str, event: Event) -> None:
        if isinstance(event, Measured):
            measured.append(event.costs)

    links = links or choose_links(None)
    large = _large_count(links.rate.bps)
    roles = Roles(
        workers=1,
        worker=lambda _rank, addresses, _again: EchoWorker(server=f"grpc://{addresses[0]}", large=large).command(),
        server=lambda _index, _again: EchoServer().command(),
    )
    run_cluster(roles, Place(links=links), [Measured], collect)
    [costs] = measured
    return costs


def _large_count(bps: int | None) -> int:
    """Returns how many large packets go there and back.

    >>> _large_count(None), _large_count(10_000_000), _large_count(50_000_000)
    (60, 8, 39)
    """
    if bps is None:
        return _LARGE_COUNT
    return max(_LARGE_FEWEST, min(_LARGE_COUNT, int(_LARGE_WITHIN_S * bps / (2 * 8 * LARGE_NBYTES))))


def _exchange(connection: Connection, nbytes: int, count: int) -> tuple[float, float, float]:
    """Returns processor seconds of a message at the worker and at the server, and seconds of a round trip."""
    packet, seconds = bytes(nbytes), []
    for _ in range(_WARMING):
        _round_trip(connection, packet)
    server_before, worker_before = _server_cpu_s(connection), time.process_time()
    for _ in range(count):
        time.sleep(PAUSE_S)
        begin = time.perf_counter()
        _round_trip(connection, packet)
        seconds.append(time.perf_counter() - begin)
    worker_after, server_after = time.process_time(), _server_cpu_s(connection)
    worker_s, server_s = (worker_after - worker_before) / (2 * count), (server_after - server_before) / (2 * count + 2)
    return worker_s, server_s, statistics.median(seconds)


def _round_trip(connection: Connection, packet: bytes) -> bytes:
    connection.send(packet)
    answer = connection.receive(60.0)
    if answer is None:
        raise TransportError("the echo has ended")
    return answer


def _server_cpu_s(connection: Connection) -> float:
    seconds: float = struct.unpack("<d", _round_trip(connection, _ASK))[0]
    return seconds


class Echo:
    """A handler of sessions that sends packets back, and its processor seconds where it is asked."""

    def __init__(self, sender: Sender, ended: threading.Event) -> None:
        self._sender, self._ended = sender, ended

    def opened(self, peer: int) -> None:
        """Has it taken for one that has joined: others are sent away after a while."""
        self._sender.limit(peer, MAX_JOIN_NBYTES, self._ended.set)

    def received(self, peer: int, packet: bytes) -> None:
        self._sender.send(peer, struct.pack("<d", time.process_time()) if packet == _ASK else packet)

    def closed(self, peer: int, error: str | None) -> None:
        self._ended.set()

    def interrupted(self, peer: int) -> bool:
        """Whether the peer may come back: it may not."""
        return False

    def resumed(self, peer: int) -> None:
        """Nothing to do: no peer comes back."""
