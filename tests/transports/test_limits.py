"""Addresses, packets and options out of range are refused by name; wire bytes follow their formula."""

from __future__ import annotations

import re
from typing import Any

import pytest

from thinwire.errors import ConfigError, TransportError
from thinwire.transports.addresses import parse_address, parse_dialled
from thinwire.transports.base import CHUNK_NBYTES, check_packet, wire_nbytes
from thinwire.transports.grpc import GrpcOptions

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


def test_wire_bytes_follow_the_stated_formula() -> None:
    for nbytes, num_http2_frames in [(1, 1), (16_379, 1), (16_380, 2), (32_763, 2), (32_764, 3), (1_000_000, 62)]:
        assert wire_nbytes(bytes(nbytes)) == nbytes + 5 + 9 * num_http2_frames
    chunk = CHUNK_NBYTES + 5 + 9 * 65
    assert wire_nbytes(bytes(CHUNK_NBYTES)) == chunk + 5 + 9, "a packet of whole chunks ends with an empty message"
    assert wire_nbytes(bytes(3 * CHUNK_NBYTES + 20)) == 3 * chunk + 20 + 5 + 9


def test_the_message_limit_is_inclusive() -> None:
    check_packet(bytes(104), 104)
    with pytest.raises(TransportError, match=r"104 bytes is over .* limit of 103 bytes"):
        check_packet(bytes(104), 103)


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
