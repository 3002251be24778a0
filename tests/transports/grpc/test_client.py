"""What only the worker's end over gRPC promises: who is reached, what is pending, TLS."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from thinwire.errors import ConfigError, DeadlineError, TransportError
from thinwire.transports import Sender
from thinwire.transports.grpc import GrpcOptions, Tls, client
from thinwire.transports.grpc.client import GrpcConnection, connect
from thinwire.transports.grpc.options import GOODBYE, GREETING, METHOD, SERVICE
from thinwire.transports.grpc.server import serve

if TYPE_CHECKING:
    from tests.transports.conftest import Cluster

WAIT_S = 20.0


class Echo:
    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    def opened(self, peer: int) -> None: ...

    def received(self, peer: int, packet: bytes) -> None:
        self.sender.send(peer, packet)

    def closed(self, peer: int, error: str | None) -> None: ...


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


class TestConnecting:
    def test_no_server_is_a_deadline_error_with_the_address(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        with pytest.raises(DeadlineError, match=f"no server answered at {address} within 0.1 s; check that it"):
            connect(f"grpc://{address}", connect_timeout_s=0.1)

    def test_a_listener_that_says_nothing_is_no_server(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(DeadlineError, match=f"no server answered at {address}"):
                connect(address, connect_timeout_s=0.2)

    def test_another_grpc_service_is_named_as_such(self) -> None:
        other = grpc.server(futures.ThreadPoolExecutor(1))
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        with pytest.raises(TransportError, match=f"what listens at 127.0.0.1:{port} is no thinwire server"):
            connect(f"127.0.0.1:{port}", connect_timeout_s=WAIT_S)
        other.stop(None).wait()

    def test_a_goodbye_from_a_server_breaks_the_session(self) -> None:
        def greet_and_leave(requests: object, context: grpc.ServicerContext) -> Iterator[bytes]:
            context.send_initial_metadata((GREETING,))
            yield GOODBYE

        method = grpc.stream_stream_rpc_method_handler(greet_and_leave)
        other = grpc.server(futures.ThreadPoolExecutor(1))
        other.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))
        address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
        other.start()
        with pytest.raises(TransportError, match="broke the conversation: the worker's goodbye came from a server"):
            connect(address, connect_timeout_s=WAIT_S).receive(WAIT_S)
        other.stop(None).wait()

    def test_a_server_that_starts_late_is_waited_for(self) -> None:
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

    @pytest.mark.parametrize(
        "said",
        ["Ssl handshake failed (…)", "Custom verification check failed", "Peer name a is not in peer certificate"],
    )
    def test_who_is_not_trusted_is_not_waited_for(self, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """However the versions of gRPC say it."""
        monkeypatch.setattr(client, "ASK_AFTER_S", 0.01)
        monkeypatch.setattr(GrpcConnection, "_last_failure", lambda connection: said)
        with pytest.raises(TransportError, match=f"do not trust each other: {re.escape(said)}"):
            connect(f"127.0.0.1:{free_port()}", connect_timeout_s=WAIT_S)

    def test_port_zero_cannot_be_connected_to(self) -> None:
        with pytest.raises(ConfigError, match="connect to the port that the server reports"):
            connect("127.0.0.1:0")


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
    def test_send_blocks_while_the_server_does_not_read(self, grpc_cluster: Cluster) -> None:
        gate = threading.Event()

        def wait_at_the_gate(sender: Sender, peer: int, packet: bytes) -> None:
            assert gate.wait(WAIT_S)

        recorder = grpc_cluster.serve(wait_at_the_gate, max_pending_nbytes=2_000_000)
        connection = grpc_cluster.connect()
        packet = bytes(1_000_000)

        def send_all() -> None:
            for _ in range(64):
                connection.send(packet)

        sender = threading.Thread(target=send_all)
        sender.start()
        sender.join(0.3)  # 64 MB: more than HTTP/2's windows and the sockets' buffers take
        assert sender.is_alive()
        gate.set()
        sender.join(WAIT_S)
        connection.close()
        assert recorder.wait_closed() is None
        assert len(recorder.packets()) == 64

    def test_a_sender_that_waits_is_woken_by_the_end(self, grpc_cluster: Cluster) -> None:
        gate = threading.Event()

        def wait_at_the_gate(sender: Sender, peer: int, packet: bytes) -> None:
            assert gate.wait(WAIT_S)

        grpc_cluster.serve(wait_at_the_gate, max_pending_nbytes=2_000_000)
        connection = grpc_cluster.connect()
        errors: list[str] = []

        def send_all() -> None:
            try:
                for _ in range(64):
                    connection.send(bytes(1_000_000))
            except TransportError as error:
                errors.append(str(error))

        sender = threading.Thread(target=send_all)
        sender.start()
        sender.join(0.2)
        connection.abort()
        sender.join(WAIT_S)
        gate.set()
        assert len(errors) == 1 and "this end has closed the session" in errors[0]

    def test_an_end_that_nobody_confirms_is_a_deadline_error(self, grpc_cluster: Cluster) -> None:
        gate = threading.Event()

        def wait_at_the_gate(sender: Sender, peer: int, packet: bytes) -> None:
            assert gate.wait(WAIT_S)

        grpc_cluster.serve(wait_at_the_gate)
        connection = grpc_cluster.connect()
        connection.send(b"1")
        with pytest.raises(DeadlineError, match=r"did not confirm the end of the session within 0\.1 s"):
            connection.close(timeout_s=0.1)
        gate.set()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A self-signed certificate for 127.0.0.1, which is its own root."""
    folder: Path = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=thinwire"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    certificate = (folder / "cert.pem").read_bytes()
    return Tls(root=certificate, certificate=certificate, key=(folder / "key.pem").read_bytes())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
class TestTls:
    def test_a_worker_that_knows_the_root_is_served(self, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "ASK_AFTER_S", 0.05)
        at_server = GrpcOptions(tls=Tls(certificate=tls.certificate, key=tls.key))
        at_worker = GrpcOptions(tls=Tls(root=tls.root))
        packet = bytes(range(256)) * 1000
        with serve(Echo, "127.0.0.1:0", options=at_server) as server:
            with connect(server.address, options=at_worker) as connection:
                connection.send(packet)
                assert connection.receive(WAIT_S) == packet
            with pytest.raises(TransportError, match="uses TLS, and this worker does not"):
                connect(server.address, connect_timeout_s=WAIT_S)

    def test_a_server_may_demand_certificates_of_its_workers(self, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "ASK_AFTER_S", 0.05)
        with serve(Echo, "127.0.0.1:0", options=GrpcOptions(tls=tls)) as server:
            with connect(server.address, options=GrpcOptions(tls=tls)) as connection:
                connection.send(b"1")
                assert connection.receive(WAIT_S) == b"1"
            nameless = GrpcOptions(tls=Tls(root=tls.root))
            with pytest.raises(TransportError, match="lets in only workers with a certificate, and this one has none"):
                connect(server.address, connect_timeout_s=WAIT_S, options=nameless)

    def test_a_certificate_for_another_host_is_not_trusted(self, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "ASK_AFTER_S", 0.05)
        elsewhere = GrpcOptions(tls=Tls(root=tls.root, server_name="elsewhere"))
        at_server = GrpcOptions(tls=Tls(certificate=tls.certificate, key=tls.key))
        with (
            serve(Echo, "127.0.0.1:0", options=at_server) as server,
            pytest.raises(
                TransportError, match=r"do not trust each other: .*must.* have a certificate for this very host"
            ),
        ):
            connect(server.address, connect_timeout_s=WAIT_S, options=elsewhere)


def test_nothing_is_opened_where_the_token_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(GrpcConnection, "_open_channel", lambda connection: opened.append(connection))

    def token() -> str:
        raise ConfigError("token file 'token' cannot be read")

    with pytest.raises(ConfigError, match="cannot be read"):
        connect("127.0.0.1:1", options=GrpcOptions(token=token))
    assert not opened
