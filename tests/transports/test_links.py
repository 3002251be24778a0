"""Links: rates are read and shaped, queues hold, addresses and options out of range are refused by name."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.transports.addresses import parse_address, parse_dialled
from thinwire.transports.base import CHUNK_NBYTES, wire_nbytes
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.links import Rate, Shaping, TokenBucket, parse_rate


def test_rates_are_read() -> None:
    for text, bps in {
        "10mbit": 10_000_000,
        "100 Mbit": 100_000_000,
        " 1GBIT ": 1_000_000_000,
        "56kbit": 56_000,
        "0.3gbit": 300_000_000,
        "none": None,
        "Unlimited": None,
    }.items():
        assert parse_rate(text) == Rate(bps), text


def test_invalid_rates_are_refused_with_the_allowed_forms() -> None:
    for text in ("", "10", "mbit", "10mb", "10mbps", "-1mbit", "1e3mbit", "nanmbit", "10mbit x", "1.mbit", "٣mbit"):
        with pytest.raises(ConfigError, match=r"cannot read the link rate .* expected .* such as 10mbit"):
            parse_rate(text)
    for text in ("0mbit", "0.5kbit", "101gbit", "9" * 400 + "gbit"):
        with pytest.raises(ConfigError, match="out of range"):
            parse_rate(text)


@given(st.integers(1_000, 100_000_000_000) | st.none())
def test_printed_rates_parse_to_equal_rates(bps: int | None) -> None:
    assert parse_rate(str(Rate(bps))) == Rate(bps)


NO_ADDRESSES = ["", "host", "host:", ":50051", "host:port", "host:-1", "host:65536", "::1:50051", "a/b:1", "http://a:1"]


def test_invalid_addresses_are_refused_and_port_0_only_listens() -> None:
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


def test_a_burst_passes_at_once_and_debt_makes_later_messages_queue() -> None:
    bucket = TokenBucket(8_000, burst_bytes=500)
    assert bucket.delay(500, now=0.0) == 0.0
    assert bucket.delay(500, now=1_000.0) == 0.0
    assert bucket.delay(500, now=1_000.0) == pytest.approx(0.5)
    bucket = TokenBucket(8_000, burst_bytes=100)
    assert bucket.delay(1_100, now=5.0) == pytest.approx(1.0)
    bucket = TokenBucket(8_000, burst_bytes=0)
    assert bucket.delay(1_000, now=0.0) == pytest.approx(1.0)
    assert bucket.delay(1_000, now=0.25) == pytest.approx(1.75)
    bucket = TokenBucket(8_000, burst_bytes=0)
    assert bucket.delay(0, now=0.0) == 0.0
    bucket.delay(1_000, now=0.0)
    assert bucket.delay(0, now=0.5) == pytest.approx(0.5)


@given(
    messages=st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 2)), min_size=1, max_size=40),
    burst=st.integers(0, 20_000),
)
def test_no_window_carries_more_than_rate_times_time_plus_burst(messages: list[tuple[int, float]], burst: int) -> None:
    rate_bps = 80_000.0
    bucket, now = TokenBucket(rate_bps, burst), 0.0
    releases: list[tuple[float, float]] = []  # (when the message's first byte could leave, when its last did)
    sizes = []
    for nbytes, pause in messages:
        now += pause
        delay = bucket.delay(nbytes, now)
        assert delay >= 0
        releases.append((now, now + delay))
        sizes.append(nbytes)
        now += delay
    for first in range(len(sizes)):
        for last in range(first, len(sizes)):
            window = releases[last][1] - releases[first][0]
            assert sum(sizes[first : last + 1]) <= window * rate_bps / 8 + burst + 1e-3


def test_one_sender_pays_once_and_many_senders_queue_at_the_receiver() -> None:
    alone = TokenBucket(8_000, burst_bytes=0)
    assert alone.arrival_delay(1_000, now=1.0) == pytest.approx(0.0)
    assert alone.arrival_delay(1_000, now=2.0) == pytest.approx(0.0), "back to back at the link's own rate"
    shared = TokenBucket(8_000, burst_bytes=0)
    assert [shared.arrival_delay(1_000, now=1.0) for _ in range(3)] == pytest.approx([0.0, 1.0, 2.0])


def test_impossible_rates_bursts_and_sizes_are_refused() -> None:
    for rate in (0, -1, math.nan, math.inf):
        for make in (lambda rate: TokenBucket(rate, 0), Shaping.symmetric):
            with pytest.raises(ConfigError, match="bits per second > 0"):
                make(rate)
    with pytest.raises(ConfigError, match="burst_bytes is -1"):
        TokenBucket(1, -1)
    with pytest.raises(ConfigError, match="cannot send -5 bytes"):
        TokenBucket(1, 0).delay(-5, now=0.0)
