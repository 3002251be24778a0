"""Addresses, limits and certificates: what is refused, and how it is said."""

from __future__ import annotations

import re
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.transports.grpc import GrpcOptions, Tls
from thinwire.transports.grpc.options import parse_address

NO_ADDRESSES = ["", "host", "host:", ":50051", "host:port", "host:-1", "host:65536", "::1:50051", "a/b:1", "http://a:1"]


def test_what_is_no_address_is_refused() -> None:
    for address in NO_ADDRESSES:
        with pytest.raises(ConfigError, match=re.escape(f"{address!r} is no address; give host:port")):
            parse_address(address)


def test_a_value_out_of_range_is_named() -> None:
    for option, value in (
        ("max_message_nbytes", 0),
        ("max_message_nbytes", 2**31),
        ("max_pending_nbytes", 0),
        ("keepalive_s", 0.5),
        ("keepalive_s", float("nan")),
    ):
        options: dict[str, Any] = {option: value}
        with pytest.raises(ConfigError, match=f"{option} is {value}; give"):
            GrpcOptions(**options)


def test_certificate_and_key_come_together() -> None:
    halves: list[dict[str, Any]] = [{"certificate": b"pem"}, {"key": b"pem"}]
    for half in halves:
        with pytest.raises(ConfigError, match="certificate and key together"):
            Tls(**half)
