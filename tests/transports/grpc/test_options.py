from __future__ import annotations

import re
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.transports.grpc import GrpcOptions, Tls
from thinwire.transports.grpc.options import SERVICE, parse_address


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":50051", "host:port", "host:-1", "host:65536", "::1:50051", "a/b:1", "http://a:1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{address!r} is no address; give host:port")):
        parse_address(address)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_message_nbytes", 0),
        ("max_message_nbytes", 2**31),
        ("max_pending_nbytes", 0),
        ("keepalive_s", 0.5),
        ("keepalive_s", float("nan")),
    ],
)
def test_a_value_out_of_range_is_named(option: str, value: float) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError, match=f"{option} is {value}; give"):
        GrpcOptions(**options)


@pytest.mark.parametrize("half", [{"certificate": b"pem"}, {"key": b"pem"}])
def test_certificate_and_key_come_together(half: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError, match="certificate and key together"):
        Tls(**half)


def test_the_service_is_called_as_the_documentation_says() -> None:
    assert SERVICE == "thinwire.v1.Exchange"
