"""The queues with which the kernel makes a link thin, as `tc` takes them.

Their sizes are measured: small enough that a pause earns hardly any free bytes, deep enough that several senders at
once lose little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from thinwire.transports.links import Rate, burst_nbytes, parse_rate

_INSTANT_BPS = 8 * 10**15


def burst_of(rate: Rate) -> float:
    """Returns the bytes that pass at once after a pause; the queue cuts a larger packet up."""
    return math.inf if rate.bps is None else burst_nbytes(rate.bps)


def qdisc(rate: Rate, largest_nbytes: int | None = None) -> str:
    """The arguments that `tc qdisc replace … root` takes for one direction of a link.

    An unlimited link gets a plain queue, because a queue counts the headers of every packet; a bare device counts
    those of a large segment once.

    Args:
        rate: of the link.
        largest_nbytes: packets that are larger are cut up, not only those above the burst.

    Example:
        >>> qdisc(Rate(10_000_000))
        'tbf rate 10000000bit burst 4096 limit 262144'
        >>> qdisc(Rate(None))
        'pfifo limit 1000'
    """
    if rate.bps is None:
        return "pfifo limit 1000"
    # Measured good with three senders to one receiver: 256 KiB at 10 Mbit/s, 1 MiB at 100 Mbit/s and 4 MiB at
    # 1 Gbit/s. Never below 64 KiB, the largest segment that TCP hands down at once.
    limit_nbytes = max(65536, round(262144 * 4 ** math.log10(rate.bps / 10e6)))
    # A second bucket cuts up what comes from now on. Larger packets that wait already pass it, because at this rate
    # a packet takes less than a nanosecond, the clock's unit, and costs no token.
    smaller = f" peakrate {_INSTANT_BPS}bit mtu {largest_nbytes}" if largest_nbytes else ""
    return f"tbf rate {rate.bps}bit burst {burst_nbytes(rate.bps)} limit {limit_nbytes}{smaller}"


def first_thin(links: Iterable[str]) -> str | None:
    """Returns the first rate that is a limit, as it was given; None without any.

    Raises:
        ConfigError: a rate that `parse_rate` cannot read.

    Example:
        >>> first_thin(["none", "10mbit", "1gbit"]), first_thin(["unlimited"])
        ('10mbit', None)
    """
    return next((link for link in links if parse_rate(link).bps is not None), None)
