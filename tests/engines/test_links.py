"""Rates are read exactly, printed readably, and become the queue settings that were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.engines.links import Rate, parse_rate
from thinwire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("10mbit", 10_000_000),
        ("100 Mbit", 100_000_000),
        (" 1GBIT ", 1_000_000_000),
        ("56kbit", 56_000),
        ("0.3gbit", 300_000_000),
        ("none", None),
        ("Unlimited", None),
    ],
)
def test_rates_are_read(text: str, bps: int | None) -> None:
    assert parse_rate(text) == Rate(bps)


@pytest.mark.parametrize(
    "text",
    ["", "10", "mbit", "10mb", "10mbps", "-1mbit", "1e3mbit", "nanmbit", "10mbit x", "1.mbit", "٣mbit"],
)
def test_nonsense_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the link rate .* expected .* such as 10mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0mbit", "0.5kbit", "101gbit", "9" * 400 + "gbit"])
def test_rates_no_link_has_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        parse_rate(text)


@given(st.integers(1_000, 100_000_000_000) | st.none())
def test_what_is_printed_reads_back(bps: int | None) -> None:
    assert parse_rate(str(Rate(bps))) == Rate(bps)


@pytest.mark.parametrize(
    ("text", "burst_kib", "limit_kib"), [("10mbit", 4, 256), ("100mbit", 16, 1024), ("1gbit", 128, 4096)]
)
def test_queues_at_the_measured_rates(text: str, burst_kib: int, limit_kib: int) -> None:
    rate = parse_rate(text)
    assert (rate.burst_nbytes, rate.limit_nbytes) == (burst_kib * 1024, limit_kib * 1024)
    assert rate.qdisc() == f"tbf rate {rate.bps}bit burst {burst_kib * 1024} limit {limit_kib * 1024}"


@given(st.integers(1_000, 100_000_000_000))
def test_a_queue_holds_more_than_its_burst_and_the_burst_two_packets(bps: int) -> None:
    rate = Rate(bps)
    assert 2 * 1514 <= rate.burst_nbytes < rate.limit_nbytes < 2**32, "tc keeps sizes in 32 bits"


def test_an_unlimited_link_has_a_queue_that_counts_and_no_settings() -> None:
    assert Rate(None).qdisc() == "pfifo limit 1000"
    with pytest.raises(ConfigError, match="unlimited link has no burst"):
        _ = Rate(None).burst_nbytes
    with pytest.raises(ConfigError, match="unlimited link has no burst"):
        _ = Rate(None).limit_nbytes
