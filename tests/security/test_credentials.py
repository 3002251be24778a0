"""Credentials from files: what is read, what goes together, and what is refused before anything listens or connects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.security.conftest import Pki
from thinwire.errors import ConfigError
from thinwire.security import Credentials
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.grpc.client import connect
from thinwire.transports.grpc.server import serve
from thinwire.transports.trust import Caller


def test_a_servers_and_a_workers_options(pki: Pki) -> None:
    server, worker = pki.server().server(), pki.worker(1).worker(1)
    assert server.tls is not None and worker.tls is not None and worker.token is not None
    assert server.tls.root == worker.tls.root and server.authenticate is not None and server.token is None
    assert server.authenticate(Caller(worker.token(), ("worker-1",))).rank == 1
    shown = repr([pki.server(), server, server.tls, worker, Caller(worker.token())])
    assert "PRIVATE" not in shown and not any(secret in shown for secret in pki.secrets)
    base = GrpcOptions(keepalive_s=7, insecure=True)
    assert Credentials().worker(0, base) == Credentials().server(base) == base


def test_halves_are_refused_and_files_named(pki: Pki, tmp_path: Path) -> None:
    server, text = pki.server(), tmp_path / "text"
    text.write_text("hello")
    for change, why in (
        ({"key": None}, "a certificate needs its key"),
        ({"cert": None, "key": None}, "needs a certificate of its own"),
        ({"token_file": None}, "needs a token file too"),
        ({"ca": text}, "text' holds no PEM"),
        ({"key": tmp_path / "gone"}, "key '.*gone' cannot be read: No such file"),
    ):
        options: dict[str, Any] = change
        with pytest.raises(ConfigError, match=why):
            replace(server, **options).server()
    assert replace(server, token_file=None, insecure=True).server().authenticate is not None
    with pytest.raises(ConfigError, match="has no token for rank 1"):
        pki.worker(0).worker(1)


def nobody(_: object) -> Any:
    raise AssertionError("nothing is served")


def test_beyond_this_machine_a_server_needs_both_and_a_token_needs_tls(pki: Pki) -> None:
    full = pki.server().server()
    for options, missing in (
        (GrpcOptions(), "without a certificate and a token file lets everybody in"),
        (replace(full, authenticate=None), "without a token file lets"),
        (replace(full, tls=None), "without a certificate lets"),
    ):
        for address in ("0.0.0.0:0", "[::]:0", "10.0.0.1:0"):
            with pytest.raises(ConfigError, match=missing):
                serve(nobody, address, options=options)
        replace(options, insecure=True).check_server("0.0.0.0")
    full.check_server("0.0.0.0")
    clear = replace(pki.worker(0), ca=None, cert=None, key=None).worker(0)
    with pytest.raises(ConfigError, match=r"a token would travel to 10.0.0.1 in the clear: give --tls-ca"):
        connect("10.0.0.1:7070", options=clear)
    for allowed in (replace(clear, insecure=True), pki.worker(0).worker(0), GrpcOptions()):
        allowed.check_worker("10.0.0.1")
    clear.check_worker("127.0.0.1")
