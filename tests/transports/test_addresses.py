"""Addresses: what is refused, and how it is said."""

from __future__ import annotations

import re

import pytest

from thinwire.errors import ConfigError
from thinwire.transports.addresses import parse_address, parse_dialled

NO_ADDRESSES = ["", "host", "host:", ":50051", "host:port", "host:-1", "host:65536", "::1:50051", "a/b:1", "http://a:1"]


def test_addresses_that_cannot_be_are_refused_and_port_0_is_for_servers() -> None:
    for parse in (parse_address, parse_dialled):
        for address in NO_ADDRESSES:
            with pytest.raises(ConfigError, match=re.escape(f"{address!r} is no address; give host:port")):
                parse(address)
    assert parse_address("host:0") == ("host", 0)
    with pytest.raises(ConfigError, match="'grpc://host:0' has port 0; connect to the port that the server reports"):
        parse_dialled("grpc://host:0")
    assert parse_dialled("grpc://host:1") == ("host", 1)
