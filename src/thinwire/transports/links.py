"""A thin link: its rate in the units of `tc` (`10mbit`), and token buckets that limit one process to a rate.

The buckets are for machines where the kernel cannot shape. They are sans-IO: a caller gives a number of bytes and the
time, gets the seconds to wait, and sleeps. A bucket may go into debt, so a message larger than the burst takes the time
that the link would take, and the next one queues behind it. Buckets count only the given bytes: they do not model
TCP/IP headers (about 4 % on a real link), retransmits, slow start or interleaved messages.
"""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass

from thinwire.errors import ConfigError

BITS_PER_BYTE = 8
_UNITS_BPS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3}
_UNLIMITED_WORDS = ("none", "unlimited")
_MIN_BPS, _MAX_BPS = 10**3, 100 * 10**9
_ALLOWED = "a number with kbit, mbit or gbit, such as 10mbit, from 1kbit to 100gbit; or none"


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate of a link in each direction; None is no limit.

    Args:
        bps: bits per second, Ethernet headers included, as the kernel counts them.

    Raises:
        ConfigError: less than 1 kbit/s or more than 100 Gbit/s.
    """

    bps: int | None

    def __post_init__(self) -> None:
        if self.bps is not None and not _MIN_BPS <= self.bps <= _MAX_BPS:
            raise ConfigError(f"a link of {self.bps} bit/s is out of range; expected {_ALLOWED}")

    def __str__(self) -> str:
        if self.bps is None:
            return _UNLIMITED_WORDS[0]
        unit = next(unit for unit, size in _UNITS_BPS.items() if self.bps >= size)
        return f"{self.bps / _UNITS_BPS[unit]:.12g}{unit}"


def parse_rate(text: str) -> Rate:
    """Reads a link's rate: a number with `kbit`, `mbit` or `gbit`, powers of 1000; or `none` or `unlimited`.

    Raises:
        ConfigError: anything else, or a rate out of range.

    Example:
        >>> parse_rate("10mbit"), str(parse_rate("0.5 Gbit")), parse_rate("none").bps
        (Rate(bps=10000000), '500mbit', None)
    """
    word = str(text).strip().lower()  # scripts pass numbers too, and get the error below
    if word in _UNLIMITED_WORDS:
        return Rate(None)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]bit)", word, flags=re.ASCII)
    if match is None:
        raise ConfigError(f"cannot read the link rate {text!r}; expected {_ALLOWED}")
    number, unit = match.groups()
    if len(number) > 20:  # before any arithmetic: int(1e400) has no value, and no link needs more digits
        raise ConfigError(f"a link rate of {len(number)} digits is out of range; expected {_ALLOWED}")
    return Rate(round(float(number) * _UNITS_BPS[unit]))


def burst_nbytes(rate_bps: float) -> int:
    """Returns the burst for a rate, in bytes: 1–3 ms at that rate, and never below two Ethernet frames.

    A full bucket passes bytes without delay after each pause, so it must be small beside a message; above 100 Mbit/s a
    burst below 1 ms costs throughput, because timers are coarser. A power law fits the measured best values.

    Raises:
        ConfigError: the rate is not a positive finite number.

    Example:
        >>> [burst_nbytes(rate) for rate in (10e6, 100e6, 1e9)]
        [4096, 16384, 131072]
    """
    _check_positive("rate_bps", rate_bps)
    return max(4096, round(16384 * 8 ** math.log10(rate_bps / 100e6)))


class TokenBucket:
    """One direction of a link: `rate_bps` bits a second, with at most `burst_bytes` sent ahead of it.

    Connections of one process on one link share a bucket, from several threads.

    Args:
        rate_bps: bits per second.
        burst_bytes: bytes that pass without waiting after a pause; 0 makes every byte wait.

    Raises:
        ConfigError: the rate is not a positive finite number, or the burst is negative or not finite.

    Example:
        >>> bucket = TokenBucket(8_000, burst_bytes=0)  # 1000 bytes a second
        >>> bucket.delay(500, now=0.0), bucket.delay(500, now=0.0), bucket.delay(500, now=9.0)
        (0.5, 1.0, 0.5)
    """

    def __init__(self, rate_bps: float, burst_bytes: float) -> None:
        _check_positive("rate_bps", rate_bps)
        if not (math.isfinite(burst_bytes) and burst_bytes >= 0):
            raise ConfigError(f"burst_bytes is {burst_bytes!r}; give a finite number of bytes >= 0")
        self.rate_bps = float(rate_bps)
        self.burst_bytes = float(burst_bytes)
        self._lock = threading.Lock()
        # The time when the link has sent all bytes booked so far. It holds tokens and debt in one number:
        # tokens = (now - idle_since) · rate, at most the burst; debt where it lies in the future.
        self._idle_since = -math.inf

    def seconds(self, nbytes: int) -> float:
        """Returns the seconds that the link needs for `nbytes` at its rate, without the burst."""
        return nbytes * BITS_PER_BYTE / self.rate_bps

    def delay(self, nbytes: int, now: float) -> float:
        """Books a message of `nbytes` bytes, and returns how many seconds to wait before it is sent.

        Args:
            nbytes: of the message; booked even if the caller does not wait.
            now: seconds on a monotonic clock, the same for all calls.

        Raises:
            ConfigError: `nbytes` is negative.
        """
        return self._book(nbytes, started=now, now=now)

    def arrival_delay(self, nbytes: int, now: float) -> float:
        """Books `nbytes` that have just arrived over another shaped link, and returns how many seconds to hold them.

        A real message flows through both links at once. It therefore counts as begun `seconds(nbytes)` ago: a lone
        message waits no longer, and messages of several senders queue, as on the receiver's link.
        """
        return self._book(nbytes, started=now - self.seconds(nbytes), now=now)

    def _book(self, nbytes: int, started: float, now: float) -> float:
        if nbytes < 0:
            raise ConfigError(f"cannot send {nbytes} bytes; give a size >= 0")
        with self._lock:
            earliest = started - self.burst_bytes * BITS_PER_BYTE / self.rate_bps
            self._idle_since = max(self._idle_since, earliest) + self.seconds(nbytes)
            return max(0.0, self._idle_since - now)


@dataclass(frozen=True, slots=True)
class Shaping:
    """Both directions of one process's link: a sender waits `egress.delay`, a receiver `ingress.arrival_delay`."""

    egress: TokenBucket
    ingress: TokenBucket

    @classmethod
    def symmetric(cls, rate_bps: float) -> Shaping:
        """Returns the same rate in both directions, with its `burst_nbytes`.

        Raises:
            ConfigError: the rate is not a positive finite number.
        """
        burst = burst_nbytes(rate_bps)
        return cls(TokenBucket(rate_bps, burst), TokenBucket(rate_bps, burst))


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value!r}; give a finite number of bits per second > 0")
