"""The application-level link: rates hold over any pattern of messages, bursts are bounded, debt queues."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.transports.shaped import Shaping, TokenBucket


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
