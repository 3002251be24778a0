"""Rates are read exactly, printed readably, and become the queue settings that were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.transports.links import Rate, parse_rate


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


def test_what_is_no_rate_is_refused_with_what_is_allowed() -> None:
    for text in ("", "10", "mbit", "10mb", "10mbps", "-1mbit", "1e3mbit", "nanmbit", "10mbit x", "1.mbit", "٣mbit"):
        with pytest.raises(ConfigError, match=r"cannot read the link rate .* expected .* such as 10mbit"):
            parse_rate(text)
    for text in ("0mbit", "0.5kbit", "101gbit", "9" * 400 + "gbit"):
        with pytest.raises(ConfigError, match="out of range"):
            parse_rate(text)


@given(st.integers(1_000, 100_000_000_000) | st.none())
def test_what_is_printed_reads_back(bps: int | None) -> None:
    assert parse_rate(str(Rate(bps))) == Rate(bps)


def test_queues_at_the_measured_rates() -> None:
    for text, burst_kib, limit_kib in (("10mbit", 4, 256), ("100mbit", 16, 1024), ("1gbit", 128, 4096)):
        rate = parse_rate(text)
        assert rate.qdisc() == f"tbf rate {rate.bps}bit burst {burst_kib * 1024} limit {limit_kib * 1024}"
    assert Rate(None).qdisc() == "pfifo limit 1000", "a queue that counts"
