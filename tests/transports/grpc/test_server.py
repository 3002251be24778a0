"""Properties of the gRPC server alone: ports, foreign and dying peers, shaping, health, memory, descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace

import grpc
import pytest

from tests.transports.conftest import Cluster, Echo, Idle
from thinwire.errors import ConfigError, TransportError
from thinwire.transports.base import CHUNK_NBYTES, UNAUTHENTICATED, wire_nbytes
from thinwire.transports.grpc import GrpcOptions, Tls
from thinwire.transports.grpc.client import connect
from thinwire.transports.grpc.options import GOODBYE, METHOD, SERVICE
from thinwire.transports.grpc.server import serve
from thinwire.transports.grpc.sessions import StreamSession
from thinwire.transports.links import Shaping, TokenBucket

WAIT_S = 20.0
WORKER = """
import sys, time
from thinwire.transports.grpc.client import connect
connection = connect(sys.argv[1])
connection.send(b"1")
time.sleep(60)
"""


def speak(address: str, messages: Iterable[bytes]) -> grpc.RpcError | None:
    """Says `messages` in one session and returns how the server took it."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        session = channel.stream_stream(f"/{SERVICE}/{METHOD}", request_serializer=bytes, response_deserializer=bytes)
        try:
            list(session(iter(messages), timeout=WAIT_S))
        except grpc.RpcError as error:
            return error
    return None


class TestPorts:
    def test_a_port_in_use_is_named_and_is_free_again_after_the_stop(self) -> None:
        with serve(Idle, "127.0.0.1:0") as first, socket.create_server(("127.0.0.1", 0)) as other:
            for address in (first.address, f"127.0.0.1:{other.getsockname()[1]}"):
                with pytest.raises(TransportError, match=f"port {address.rpartition(':')[2]} is in use"):
                    serve(Idle, address)
        with serve(Idle, first.address) as second:
            assert second.address == first.address

    def test_a_host_that_is_not_ours_and_a_damaged_certificate_are_not_a_port_in_use(self) -> None:
        anybody = GrpcOptions(insecure=True)
        for host, text in (
            ("192.0.2.7", "192.0.2.7 is not an address of this machine"),
            ("no-such-host.invalid", "no-such-host.invalid is no address, and no name that this machine can look up"),
        ):
            with pytest.raises(TransportError, match=f"cannot listen on {host}:7070: {text}"):
                serve(Idle, f"{host}:7070", options=anybody)
        damaged = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        with pytest.raises(ConfigError, match=r"key or ca \(--tls-cert, --tls-key, --tls-ca\) is not taken: PEM text"):
            serve(Idle, "127.0.0.1:0", options=replace(anybody, tls=Tls(certificate=damaged, key=damaged)))


class TestPeers:
    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
    def test_killed_or_frozen_worker_closes_with_an_error(self, grpc_cluster: Cluster, end: signal.Signals) -> None:
        recorder = grpc_cluster.serve(keepalive_s=1.0)
        with subprocess.Popen([sys.executable, "-c", WORKER, grpc_cluster.server.address]) as worker:
            try:
                recorder.wait(recorder.packets)
                worker.send_signal(end)
                assert recorder.wait_closed() == "the worker went away"
            finally:
                worker.kill()

    def test_a_stream_that_ends_without_a_goodbye_is_a_crash(self, grpc_cluster: Cluster) -> None:
        recorder = grpc_cluster.serve()
        assert speak(grpc_cluster.server.address, [b"1"]) is not None
        assert recorder.wait_closed(0) == "the worker went away"
        assert speak(grpc_cluster.server.address, [b"1", GOODBYE]) is None
        assert recorder.wait_closed(1) is None

    def test_messages_over_the_limits_are_not_read(self, grpc_cluster: Cluster) -> None:
        recorder = grpc_cluster.serve()
        error = speak(grpc_cluster.server.address, [b"1", bytes(CHUNK_NBYTES + 1)])
        assert error is not None and recorder.wait_closed(0) is not None
        assert recorder.packets() == [b"1"] and recorder.server.bytes_received == wire_nbytes(b"1")
        recorder = grpc_cluster.serve(max_message_nbytes=2 * CHUNK_NBYTES)
        error = speak(grpc_cluster.server.address, [bytes(CHUNK_NBYTES)] * 40)
        assert error is not None and "over the message limit" in str(error.details())
        assert recorder.wait_closed(0) is not None and recorder.packets() == []
        assert recorder.server.bytes_received <= 3 * wire_nbytes(bytes(CHUNK_NBYTES)), "the rest is not read"

    def test_stalled_packet_ends_its_session(self, grpc_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("thinwire.transports.grpc.sessions.CHUNK_S", 0.1)
        recorder = grpc_cluster.serve()
        quiet = grpc_cluster.connect()  # which is in the middle of nothing
        quiet.send(b"1")

        def begin() -> Iterator[bytes]:
            yield bytes(CHUNK_NBYTES)
            recorder.wait(lambda: ("closed", 1) in [event[:2] for event in recorder.events])

        error = speak(grpc_cluster.server.address, begin())
        assert error is not None and "the worker sends a packet at less than 1048576 bytes in 0.1 s" in str(error)
        quiet.send(b"2")
        assert [quiet.receive(WAIT_S) for _ in range(2)] == [b"1", b"2"]

    def test_sessions_are_limited(self, grpc_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("thinwire.transports.grpc.server.MAX_SESSIONS", 2)
        recorder = grpc_cluster.serve()
        first, _ = grpc_cluster.connect(), grpc_cluster.connect()
        with pytest.raises(TransportError, match="the server has 2 sessions, and takes no more"):
            grpc_cluster.connect()
        first.close()
        assert recorder.wait_closed(0) is None
        third = grpc_cluster.connect()
        third.send(b"1")
        assert third.receive(WAIT_S) == b"1"

    def test_connections_are_limited_and_silent_ones_closed(
        self, grpc_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("thinwire.transports.grpc.options.MAX_CONNECTIONS", 3)
        monkeypatch.setattr("thinwire.transports.grpc.options.HANDSHAKE_S", 1)
        grpc_cluster.serve()
        honest = grpc_cluster.connect()
        host, _, port = grpc_cluster.server.address.rpartition(":")
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection((host, int(port)), WAIT_S)) for _ in range(6)]
            first = [stranger.recv(1000) for stranger in strangers]
            assert [bool(each) for each in first].count(False) == 4, "the server spoke to two and hung up on four"
            for stranger in strangers:
                while stranger.recv(1000):
                    """The server says that it takes too long, and hangs up."""
        honest.send(b"1")
        assert honest.receive(WAIT_S) == b"1"


class TestSending:
    def test_shaping_counts_every_packet_at_both_ends(self) -> None:
        class Meter(TokenBucket):
            def __init__(self) -> None:
                super().__init__(1e12, burst_bytes=0)
                self.sent: list[int] = []
                self.arrived: list[int] = []

            def delay(self, nbytes: int, now: float) -> float:
                self.sent.append(nbytes)
                return super().delay(nbytes, now)

            def arrival_delay(self, nbytes: int, now: float) -> float:
                self.arrived.append(nbytes)
                return super().arrival_delay(nbytes, now)

        meters = [Meter() for _ in range(4)]
        at_server = GrpcOptions(shaping=Shaping(egress=meters[0], ingress=meters[1]))
        at_worker = GrpcOptions(shaping=Shaping(egress=meters[2], ingress=meters[3]))
        packets = [bytes(size) for size in (1, 100, 40_000)]
        with (
            serve(Echo, "127.0.0.1:0", options=at_server) as server,
            connect(server.address, options=at_worker) as connection,
        ):
            for packet in packets:
                connection.send(packet)
                assert connection.receive(WAIT_S) == packet
            sizes = [wire_nbytes(packet) for packet in packets]
            assert meters[0].sent == meters[3].arrived == sizes
            assert meters[2].sent == meters[1].arrived == sizes
            assert meters[0].arrived == meters[1].sent == meters[2].arrived == meters[3].sent == []


HEALTH = GrpcOptions(health="127.0.0.1:0")


def test_health_probe_is_answered_while_the_loop_runs() -> None:
    server, hangs = serve(Idle, "127.0.0.1:0", options=HEALTH), threading.Event()
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
            serve(Idle, "127.0.0.1:0", options=replace(HEALTH, health=server.health_address))


def test_session_leaves_no_timer_behind_once_a_wait_is_over() -> None:
    async def wait_once() -> weakref.ref[StreamSession]:
        session = StreamSession(GrpcOptions(), UNAUTHENTICATED)
        with session.in_time("takes what it is sent"):
            pass
        return weakref.ref(session)

    async def check() -> None:
        seen = await wait_once()
        gc.collect()
        assert seen() is None, "a timer of CHUNK_S, two minutes, still holds the session and all that waits in it"

    asyncio.run(check())


SERVES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.grpc.server import serve
server = serve(lambda sender: None, "0.0.0.0:0", options=GrpcOptions(insecure=True))
print(server.address, flush=True)
sys.stdin.readline()
files = [open(sys.executable, "rb") for _ in range(16)]
print("still opens files", flush=True)
server.stop(0)
"""


def test_connections_leave_descriptors_for_the_servers_files() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stdin is not None and server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(160)]
            with contextlib.suppress(TimeoutError):  # until it has looked at all: the last one is hung up on
                strangers[-1].settimeout(5)
                strangers[-1].recv(1)
            out, err = server.communicate("go on\n", timeout=60)
    finally:
        server.kill()
        server.communicate()
    assert out == "still opens files\n", err
    assert "too few files open for 4,096 connections, and takes 64: any caller can use them up" in err
