"""Credentials: the starter's files, PEM and tokens, valid combinations, and refusals that quote no secret."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.security.conftest import Pki
from tests.transports.conftest import Recorder, echo
from thinwire.errors import ConfigError
from thinwire.security import Credentials, pem
from thinwire.security.certificates import Authority
from thinwire.security.pem import read_tls
from thinwire.security.starter import files_in, in_starter, make_starter
from thinwire.security.tokens import Token, TokenFile, new_token, parse_tokens
from thinwire.transports.base import Sender
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


def test_incomplete_credentials_are_refused_by_file(pki: Pki, tmp_path: Path) -> None:
    server, text = pki.server(), tmp_path / "text"
    text.write_text("hello")
    for change, why in (
        ({"key": None}, "a certificate needs its key"),
        ({"cert": None, "key": None}, "needs a certificate, too"),
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


def never_called(_: object) -> Any:
    raise AssertionError("nothing is served")


def test_server_beyond_loopback_needs_certificate_and_tokens(pki: Pki) -> None:
    full = pki.server().server()
    for options, missing in (
        (GrpcOptions(), "without a certificate and a token file admits every caller"),
        (replace(full, authenticate=None), "without a token file admits"),
        (replace(full, tls=None), "without a certificate admits"),
    ):
        for address in ("0.0.0.0:0", "[::]:0", "10.0.0.1:0"):
            with pytest.raises(ConfigError, match=missing):
                serve(never_called, address, options=options)
        replace(options, insecure=True).check_server("0.0.0.0")
    full.check_server("0.0.0.0")
    clear = replace(pki.worker(0), ca=None, cert=None, key=None).worker(0)
    with pytest.raises(ConfigError, match=r"a token would travel to 10.0.0.1 in the clear: give --tls-ca"):
        connect("10.0.0.1:7070", options=clear)
    for allowed in (replace(clear, insecure=True), pki.worker(0).worker(0), GrpcOptions()):
        allowed.check_worker("10.0.0.1")
    clear.check_worker("127.0.0.1")


DAMAGED = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def put(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return put


def test_unusable_files_are_refused_by_name(pki: Pki, put: Callable[[str, bytes], Path]) -> None:
    ca, cert, key = (pki.folder / name for name in ("ca.pem", "worker-0.pem", "worker-0.key"))
    locked = load_pem_private_key(key.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    old = pki.authority.issue("worker-0", [], "worker", days=-1)
    damaged, locked_key = put("damaged", DAMAGED), put("locked", locked)
    old_cert, old_key = put("old.pem", old.certificate), put("old.key", old.key)
    for files, why in (
        ((key, cert, key), r"ca '.*worker-0\.key' holds no certificate, or a damaged one"),
        ((damaged, None, None), r"ca '.*damaged' holds no certificate"),
        ((put("tail", ca.read_bytes() + DAMAGED), None, None), r"ca '.*tail' holds no certificate, or a damaged one"),
        ((ca, damaged, key), r"cert '.*damaged' holds no certificate, or a damaged one"),
        ((ca, key, key), r"cert '.*worker-0\.key' holds no certificate"),
        ((ca, cert, cert), r"key '.*worker-0\.pem' holds no private key, or a damaged one"),
        ((ca, cert, put("cut", key.read_bytes()[:-60])), r"key '.*cut' holds no private key, or a damaged one"),
        ((ca, cert, pki.folder / "worker-1.key"), r"worker-1\.key' is not the key of cert '.*worker-0\.pem'"),
        ((ca, cert, locked_key), r"key '.*locked' is encrypted, and there is no password"),
        ((ca, old_cert, old_key), r"cert '.*old\.pem' has run out: it was valid until \d{4}-.*, and now it is \d{4}-"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_tls(*files)


def test_expired_and_future_authorities_are_refused(
    pki: Pki, put: Callable[[str, bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One valid authority suffices, for example while an authority is replaced."""
    older, old = (Authority("old", days=days).issued.certificate for days in (-9, -1))
    last = datetime.now(UTC) - timedelta(days=1)
    with pytest.raises(ConfigError, match=rf"ca '.*two' has run out: it was valid until {last:%Y-%m-%d}"):
        read_tls(put("two", older + old), None, None)
    read_tls(put("three", older + (pki.folder / "ca.pem").read_bytes() + old), None, None)

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(days=3)

    monkeypatch.setattr(pem, "datetime", Behind)
    ca, cert, key = (pki.folder / name for name in ("ca.pem", "worker-0.pem", "worker-0.key"))
    for files, name in (((ca, None, None), r"ca '.*ca\.pem'"), ((None, cert, key), r"cert '.*worker-0\.pem'")):
        with pytest.raises(ConfigError, match=f"{name} is not valid yet: it will be from .*; set this machine's clock"):
            read_tls(*files)


ONE, TWO, THREE = (f"{number}-{'x' * 20}" for number in ("one", "two", "three"))


def test_token_file_lines_are_for_one_rank_or_any() -> None:
    text = f"# of the training\n\n{ONE}\nrank=3 {TWO}   # the third site\n  rank=12\t{THREE}\n"
    assert parse_tokens(text, "f") == (Token(ONE), Token(TWO, 3), Token(THREE, 12))
    assert parse_tokens(new_token(), "f")[0].rank is None
    assert parse_tokens(f"rank=3 {ONE}\nrank=3 {ONE}", "f") == (Token(ONE, 3),) * 2, "twice the same does no harm"


def test_bad_token_files_are_refused_by_line_and_without_a_secret() -> None:
    for text, why in (
        ("", "holds no token"),
        ("# nothing\n", "holds no token"),
        (f"{ONE}\nshort", "line 2: a token of 5 characters; 16 to 256"),
        ("x" * 257, "line 1: a token of 257 characters"),
        (f"{ONE} {TWO}", "line 1: expected TOKEN or rank=3 TOKEN"),
        (f"rank=x {ONE}", "line 1: expected TOKEN or rank=3 TOKEN"),
        (f"rank=3{ONE}", "line 1: expected TOKEN or rank=3 TOKEN"),
        (f"rank=-1 {ONE}", "line 1: expected TOKEN or rank=3 TOKEN"),
        ("ümlaut" * 4, "line 1: expected TOKEN"),
        (f"{ONE}\n{TWO}\n{THREE}", "3 tokens for any rank; at most two are valid at once"),
        (f"rank=1 {ONE}\nrank=1 {TWO}\nrank=1 {THREE}", "3 tokens for rank 1"),
        (f"rank=1 {ONE}\n\nrank=2 {ONE}", "line 3: the token of line 1 again, for rank 2 and not rank 1"),
        (f"rank=1 {ONE}\n{ONE}", "line 2: the token of line 1 again, for any rank and not rank 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(why)) as caught:
            parse_tokens(text, "f")
        assert not any(secret in str(caught.value) for secret in (ONE, TWO, THREE)), text
    assert ONE not in repr(Token(ONE, 3))


def write(path: Path, text: str) -> None:
    """Writes the file anew; a second within the clock's resolution would not show."""
    later = path.stat().st_mtime_ns + 1_000_000 if path.exists() else None
    path.write_text(text)
    if later is not None:
        os.utime(path, ns=(later, later))


def test_token_is_replaced_while_old_and_new_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    write(path, f"rank=1 {ONE}")
    tokens = TokenFile(path)
    assert tokens.own(1) == ONE and tokens.find(ONE) == Token(ONE, 1) and tokens.find(TWO) is None
    write(path, f"rank=1 {TWO}\nrank=1 {ONE}")
    assert tokens.own(1) == TWO and tokens.find(ONE) == Token(ONE, 1) and tokens.find(TWO) == Token(TWO, 1)
    write(path, f"rank=1 {TWO}")
    assert tokens.find(ONE) is None and tokens.find(TWO) == Token(TWO, 1)
    with pytest.raises(ConfigError, match="has no token for rank 2"):
        tokens.own(2)


def test_unreadable_token_file_admits_no_peer_until_it_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(ConfigError, match=r"tokens' cannot be read: No such file"):
        TokenFile(path)
    write(path, ONE)
    tokens = TokenFile(path)
    for broken in ("short", ""):
        write(path, broken)
        for _ in range(2):
            with pytest.raises(ConfigError):
                tokens.find(ONE)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens.find(ONE)
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="it is no text"):
        tokens.find(ONE)
    path.write_text(f"{ONE}\r\n", "utf-8-sig")  # with an editor's mark
    assert tokens.find(ONE) == Token(ONE)


WAIT_S = 20.0


def test_starter_files_are_private_and_never_overwritten(pki: Pki, tmp_path: Path) -> None:
    files = sorted(pki.folder.iterdir())
    assert files == sorted(files_in(pki.folder, 2)) and {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(pki.folder.stat().st_mode) == 0o700
    before = [file.read_bytes() for file in files]
    with pytest.raises(ConfigError, match=r"holds ca.key, ca.pem, server.key … already, and nothing is overwritten"):
        make_starter(pki.folder, pki.authority, workers=2, hosts=["127.0.0.1"])
    assert before == [file.read_bytes() for file in files]
    with pytest.raises(ConfigError, match="neither a host name nor an IP address"):
        make_starter(tmp_path / "new", pki.authority, workers=1, hosts=["größe"])
    assert not (tmp_path / "new").exists()


def test_starter_in_an_invalid_or_full_folder_raises_config_error(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder, why in ((tmp_path / "file" / "folder", "Not a directory"), (tmp_path / ("x" * 300), "name too long")):
        with pytest.raises(ConfigError, match=f"{folder} cannot be written: .*{why}; choose another folder"):
            make_starter(folder, pki.authority, workers=1, hosts=["a"])
    folder, made = tmp_path / "certs", list[Path]()

    def filling(path: Path, *given: Any) -> int:
        made.append(path)
        if len(made) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *given)

    opened = os.open
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", filling)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device; choose another folder"):
            make_starter(folder, pki.authority, workers=1, hosts=["127.0.0.1"])
    assert len(made) == 3 and not [*folder.iterdir()]
    assert make_starter(folder, pki.authority, workers=1, hosts=["127.0.0.1"])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="signs with openssl")
def test_one_more_worker_is_signed_as_documented(pki: Pki, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    [block] = re.findall(r"^```sh [^\n]*\n(openssl .*?)^```", page, re.M | re.S)
    certs = tmp_path / "certs"
    make_starter(certs, pki.authority, workers=1, hosts=["127.0.0.1"])
    subprocess.run(["bash", "-eu", "-o", "pipefail", "-c", block], cwd=tmp_path, check=True, capture_output=True)
    made: list[Recorder] = []

    def factory(sender: Sender) -> Recorder:
        made.append(Recorder(sender, echo))
        return made[0]

    with serve(factory, "127.0.0.1:0", options=in_starter(certs).server()) as server:
        options = in_starter(certs, 4).worker(4)
        with connect(server.address, connect_timeout_s=WAIT_S, options=options) as connection:
            connection.send(b"1")
            assert connection.receive(WAIT_S) == b"1"
            assert made[0].sender.identity(0).rank == 4
