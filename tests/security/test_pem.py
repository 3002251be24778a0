"""Files that cannot be used are named where they are read, before anything listens or waits for an answer."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.security.conftest import Pki
from thinwire.errors import ConfigError
from thinwire.security import pem
from thinwire.security.certificates import Authority, self_signed
from thinwire.security.pem import read_tls

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


def test_authorities_out_of_their_dates_are_refused(
    pki: Pki, put: Callable[[str, bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is valid is enough, as where an authority is being replaced."""
    older, old = (Authority("old", days=days).issued.certificate for days in (-9, -1))
    last = datetime.now(UTC) - timedelta(days=1)
    with pytest.raises(ConfigError, match=rf"ca '.*two' has run out: it was valid until {last:%Y-%m-%d}"):
        read_tls(put("two", older + old), None, None)
    read_tls(put("three", older + (pki.folder / "ca.pem").read_bytes() + old), None, None)
    itself = self_signed("server", "localhost", days=-1).certificate
    assert read_tls(put("four", itself + old), None, None).root, "it may be all that is needed, and has no dates here"

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(days=3)

    monkeypatch.setattr(pem, "datetime", Behind)
    ca, cert, key = (pki.folder / name for name in ("ca.pem", "worker-0.pem", "worker-0.key"))
    for files, name in (((ca, None, None), r"ca '.*ca\.pem'"), ((None, cert, key), r"cert '.*worker-0\.pem'")):
        with pytest.raises(ConfigError, match=f"{name} is not valid yet: it will be from .*; set this machine's clock"):
            read_tls(*files)
