"""Who is refused for want of a certificate, and who for another reason."""

from __future__ import annotations

import socket

import pytest

from tests.transports.conftest import Echo
from thinwire.security.certificates import Authority
from thinwire.transports.grpc import GrpcOptions, Tls
from thinwire.transports.grpc.handshakes import wants_certificate, wants_tls
from thinwire.transports.grpc.server import serve

ASK_S = 5.0


@pytest.fixture(scope="module")
def tls() -> Tls:
    """A server's, which asks workers for a certificate."""
    authority = Authority("the training's")
    server = authority.issue("server", ["localhost"], "server")
    return Tls(root=authority.issued.certificate, certificate=server.certificate, key=server.key)


def test_only_a_server_with_a_ca_wants_a_certificate(tls: Tls) -> None:
    without = Tls(certificate=tls.certificate, key=tls.key)
    for options, wanted in ((tls, True), (without, False), (None, False)):
        with serve(Echo, "127.0.0.1:0", options=GrpcOptions(tls=options)) as server:
            host, port = server.address.split(":")
            assert wants_certificate(host, int(port), ASK_S) is wanted
            assert wants_tls(host, int(port), ASK_S) is (options is not None)
    assert not wants_certificate(host, int(port), ASK_S), "it has stopped"


def test_silent_listeners_and_impossible_hosts_want_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not wants_certificate("127.0.0.1", port, 0.1) and not wants_tls("127.0.0.1", port, 0.1)
    for host in ("a..b", "a" * 64):
        assert not wants_certificate(host, 7070, ASK_S) and not wants_tls(host, 7070, ASK_S)
