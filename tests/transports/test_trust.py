"""Certificates: what is refused, and how it is said; that keys and tokens are never shown."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.transports.trust import Caller, Tls


def test_certificate_and_key_come_together() -> None:
    halves: list[dict[str, Any]] = [{"certificate": b"pem"}, {"key": b"pem"}]
    for half in halves:
        with pytest.raises(ConfigError, match="a certificate needs its key and a key its certificate"):
            Tls(**half)


def test_what_is_secret_is_not_shown() -> None:
    assert "secret" not in repr([Tls(certificate=b"pem", key=b"secret"), Caller("secret", ("worker-1",))])
