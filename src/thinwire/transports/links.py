"""A thin link: its rate, in the words that `tc` uses (`10mbit`), and the queue that makes the kernel keep to it.

The queue's sizes are measured: small enough that a pause earns hardly any free bytes, deep enough that several senders
at once lose little.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.transports.shaped import burst_nbytes

_UNITS_BPS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3}
_UNLIMITED_WORDS = ("none", "unlimited")
_INSTANT_BPS = 8 * 10**15
_MIN_BPS, _MAX_BPS = 10**3, 100 * 10**9
_ALLOWED = "a number with kbit, mbit or gbit, such as 10mbit, from 1kbit to 100gbit; or none"


@dataclass(frozen=True, slots=True)
class Rate:
    """How many bits a second a link carries each way; None is no limit.

    Args:
        bps: bits per second, Ethernet headers included, as the kernel counts them.

    Raises:
        ConfigError: less than 1 kbit/s or more than 100 Gbit/s.
    """

    bps: int | None

    def __post_init__(self) -> None:
        if self.bps is not None and not _MIN_BPS <= self.bps <= _MAX_BPS:
            raise ConfigError(f"a link of {self.bps} bit/s is out of range; expected {_ALLOWED}")

    @property
    def burst_nbytes(self) -> float:
        """Bytes that pass at once after a pause. A larger packet is cut up where it comes to the queue."""
        return math.inf if self.bps is None else burst_nbytes(self.bps)

    def qdisc(self, largest_nbytes: int | None = None) -> str:
        """The arguments that `tc qdisc replace … root` takes for one direction of this link.

        An unlimited link gets a plain queue, because a queue counts the headers of every packet; a bare device counts
        those of a large segment once.

        Args:
            largest_nbytes: packets that are larger are cut up, not only those above the burst.

        Example:
            >>> Rate(10_000_000).qdisc()
            'tbf rate 10000000bit burst 4096 limit 262144'
            >>> Rate(None).qdisc()
            'pfifo limit 1000'
        """
        if self.bps is None:
            return "pfifo limit 1000"
        # Measured good with three senders to one receiver: 256 KiB at 10 Mbit/s, 1 MiB at 100 Mbit/s and 4 MiB at
        # 1 Gbit/s. Never below 64 KiB, the largest segment that TCP hands down at once.
        limit_nbytes = max(65536, round(262144 * 4 ** math.log10(self.bps / 10e6)))
        # A second bucket cuts up what comes from now on. Larger packets that wait already pass it, because at this rate
        # a packet takes less than a nanosecond, the clock's unit, and costs no token.
        smaller = f" peakrate {_INSTANT_BPS}bit mtu {largest_nbytes}" if largest_nbytes else ""
        return f"tbf rate {self.bps}bit burst {burst_nbytes(self.bps)} limit {limit_nbytes}{smaller}"

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
    word = str(text).strip().lower()  # scripts give numbers too, which are told what a rate looks like
    if word in _UNLIMITED_WORDS:
        return Rate(None)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]bit)", word, flags=re.ASCII)
    if match is None:
        raise ConfigError(f"cannot read the link rate {text!r}; expected {_ALLOWED}")
    number, unit = match.groups()
    if len(number) > 20:  # before any arithmetic: int(1e400) has no value, and no link needs more digits
        raise ConfigError(f"a link rate of {len(number)} digits is out of range; expected {_ALLOWED}")
    return Rate(round(float(number) * _UNITS_BPS[unit]))


def first_thin(links: Iterable[str]) -> str | None:
    """Returns the first rate that is a limit, as it was given; None without any.

    Raises:
        ConfigError: a rate that `parse_rate` cannot read.

    Example:
        >>> first_thin(["none", "10mbit", "1gbit"]), first_thin(["unlimited"])
        ('10mbit', None)
    """
    return next((link for link in links if parse_rate(link).bps is not None), None)
