"""Properties of the worker's end over gRPC alone: addresses, pending packets, TLS, required certificates."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.transports.conftest import Cluster, Echo
from thinwire.errors import DeadlineError, TransportError
from thinwire.security.certificates import Authority
from thinwire.transports.grpc import GrpcOptions, Tls, client
from thinwire.transports.grpc.client import connect
from thinwire.transports.grpc.handshakes import wants_certificate, wants_tls
from thinwire.transports.grpc.server import serve

WAIT_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


class TestConnecting:
    def test_connect_without_answer_raises_deadline_error_with_address(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            for port in (free_port(), silent.getsockname()[1]):
                with pytest.raises(DeadlineError, match=f"no server answered at 127.0.0.1:{port} within 0.1 s"):
                    connect(f"grpc://127.0.0.1:{port}", connect_timeout_s=0.1)

    def test_connect_waits_for_a_server_that_starts_late(self) -> None:
        port = free_port()
        reached: list[bytes | None] = []

        def work() -> None:
            with connect(f"127.0.0.1:{port}", connect_timeout_s=WAIT_S) as connection:
                connection.send(b"4")
                reached.append(connection.receive(WAIT_S))

        worker = threading.Thread(target=work)
        worker.start()
        worker.join(0.2)
        with serve(Echo, f"127.0.0.1:{port}"):
            worker.join(WAIT_S)
        assert reached == [b"4"]

    def test_connect_waits_longer_for_a_busy_server_than_for_a_missing_one(self, grpc_cluster: Cluster) -> None:
        gate = threading.Event()  # holds the server's loop, as kernels do that it compiles when a worker joins
        recorder = grpc_cluster.serve(lambda *_: gate.wait(WAIT_S))  # type: ignore[arg-type]
        grpc_cluster.connect().send(b"1")
        recorder.wait(recorder.packets)
        opener = threading.Timer(4.0, gate.set)
        opener.start()
        with connect(grpc_cluster.server.address, connect_timeout_s=1.0):
            assert gate.is_set()
        opener.join()


class TestServerGone:
    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_killed_or_frozen_server_breaks_the_session(self, end: signal.Signals) -> None:
        script = (
            "from thinwire.transports.grpc.server import serve\n"
            "class Silent:\n"
            "    def __init__(self, sender): pass\n"
            "    def opened(self, peer): pass\n"
            "    def received(self, peer, packet): pass\n"
            "server = serve(Silent, '127.0.0.1:0'); print(server.address, flush=True); server.wait()"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                address = process.stdout.readline().strip()
                connection = connect(address, options=GrpcOptions(keepalive_s=1.0))
                connection.send(b"1")
                process.send_signal(end)
                with pytest.raises(TransportError, match=f"lost the server at {address}"):
                    connection.receive(WAIT_S)
            finally:
                process.kill()
        with pytest.raises(TransportError, match=f"lost the server at {address}"):
            connection.send(b"1")
        connection.close()


class TestPending:
    @pytest.fixture
    def gate(self, grpc_cluster: Cluster) -> Iterator[threading.Event]:
        """Blocks a server after its first packet, so that it reads no more."""
        gate = threading.Event()
        grpc_cluster.serve(lambda *_: gate.wait(WAIT_S), max_pending_nbytes=2_000_000)  # type: ignore[arg-type]
        yield gate
        gate.set()

    @pytest.mark.parametrize("aborts", [False, True])
    def test_send_blocks_while_the_server_does_not_read_and_is_woken_by_the_end(
        self, gate: threading.Event, grpc_cluster: Cluster, aborts: bool
    ) -> None:
        connection, errors, sent = grpc_cluster.connect(), list[str](), 0

        def send_all() -> None:
            nonlocal sent
            try:
                for _ in range(64):
                    connection.send(bytes(1_000_000))
                    sent += 1
            except TransportError as error:
                errors.append(str(error))

        sender = threading.Thread(target=send_all)
        sender.start()
        sender.join(0.3)  # 64 MB: more than HTTP/2's windows and the sockets' buffers take
        assert sender.is_alive()
        if aborts:
            connection.abort()
        else:
            gate.set()
        sender.join(WAIT_S)
        if aborts:
            assert len(errors) == 1 and "this end has closed the session" in errors[0]
        else:
            connection.close()
            assert sent == 64 and not errors

    def test_close_without_confirmation_raises_deadline_error(
        self, gate: threading.Event, grpc_cluster: Cluster
    ) -> None:
        connection = grpc_cluster.connect()
        connection.send(b"1")
        with pytest.raises(DeadlineError, match=r"did not confirm the end of the session within 0\.1 s"):
            connection.close(timeout_s=0.1)


def test_tls_servers_are_checked_by_root_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "QUERY_AFTER_S", 0.05)
    authority = Authority("the training's")
    trusting = GrpcOptions(tls=Tls(root=authority.issued.certificate))
    for host in ("127.0.0.1", "elsewhere"):
        issued = authority.issue("server", [host], "server")
        at_server = GrpcOptions(tls=Tls(certificate=issued.certificate, key=issued.key))
        with serve(Echo, "127.0.0.1:0", options=at_server) as server:
            if host == "elsewhere":
                with pytest.raises(TransportError, match="do not trust each other"):
                    connect(server.address, connect_timeout_s=WAIT_S, options=trusting)
                continue
            with connect(server.address, options=trusting) as connection:
                connection.send(b"1")
                assert connection.receive(WAIT_S) == b"1"


QUERY_S = 5.0


@pytest.fixture(scope="module")
def tls() -> Tls:
    """A server's, which asks workers for a certificate."""
    authority = Authority("the training's")
    server = authority.issue("server", ["localhost"], "server")
    return Tls(root=authority.issued.certificate, certificate=server.certificate, key=server.key)


def test_only_a_server_with_a_ca_requires_a_certificate(tls: Tls) -> None:
    without = Tls(certificate=tls.certificate, key=tls.key)
    for options, wanted in ((tls, True), (without, False), (None, False)):
        with serve(Echo, "127.0.0.1:0", options=GrpcOptions(tls=options)) as server:
            host, port = server.address.split(":")
            assert wants_certificate(host, int(port), QUERY_S) is wanted
            assert wants_tls(host, int(port), QUERY_S) is (options is not None)
    assert not wants_certificate(host, int(port), QUERY_S), "it has stopped"
