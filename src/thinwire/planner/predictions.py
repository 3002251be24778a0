"""The input of a plan, which is a cluster, and its output, which are predictions of designs in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from thinwire.errors import ConfigError
from thinwire.planner.transport_costs import TransportCosts
from thinwire.policies.naming import check_count
from thinwire.transports.links import parse_rate

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of workers that every plan answers for; the last is the largest possible."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The cluster for which the plan is made.

    Args:
        link: rate of every process's link, each way, as in `50mbit`; `none`: no limit.
        workers: how many.
        mode: `server`: parameter servers; `collective`: DDP and FSDP, every rank averages its share.
        servers: how many shards hold the model, each a process with a link of its own; as workers 1024 at most.
        latency_ms: milliseconds from a message's last byte on the link to the receiving program.
        cores: processors that all processes share, where they are on one machine; None: each has its own.
        compute: how many times as fast as here a worker computes; codecs stay as measured here.

    Raises:
        ConfigError: a number out of its range, or servers in the collective mode.

    Example:
        >>> Setting(link="50mbit", workers=8).bps
        50000000
    """

    link: str = "100mbit"
    workers: int = 4
    mode: Literal["server", "collective"] = "server"
    servers: int = 1
    latency_ms: float = 1e3 * TransportCosts().latency_s
    cores: int | None = None
    compute: float = 1.0

    def __post_init__(self) -> None:
        parse_rate(self.link)
        check_count("workers", self.workers, 1, WORKERS[-1])
        if self.mode not in ("server", "collective"):
            raise ConfigError(f"mode {self.mode!r}; there are server and collective")
        check_count("servers", self.servers, 1, WORKERS[-1])
        if self.mode == "collective" and self.servers != 1:
            raise ConfigError(f"{self.servers} servers in mode collective, which has none; leave it at 1")
        if not 0 <= self.latency_ms < math.inf:
            raise ConfigError(f"a latency of {self.latency_ms} ms; it is 0 or more")
        if self.cores is not None:
            check_count("cores", self.cores, 1)
        if not 0 < self.compute < math.inf:
            raise ConfigError(f"compute={self.compute}; a worker computes more than 0 times as fast as here")

    @property
    def bps(self) -> float:
        """Bits a second of a link; infinity is no limit."""
        return parse_rate(self.link).bps or math.inf


@dataclass(frozen=True, kw_only=True)
class Round:
    """The steps from one exchange to the next, the last of which exchanges, as predicted.

    Args:
        steps: how many.
        alone_s: of a step without an exchange, in seconds.
        exchanged_s: of the step with it.

    Example:
        >>> made = Round(steps=4, alone_s=1.0, exchanged_s=7.0)
        >>> made.step_s, made.exchange_share, made.steps_for(0.25)
        (2.5, 0.6, 18)
    """

    steps: int
    alone_s: float
    exchanged_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, the mean over those with and without an exchange."""
        return ((self.steps - 1) * self.alone_s + self.exchanged_s) / self.steps

    @property
    def exchange_s(self) -> float:
        """Seconds that the exchange adds to the round."""
        return max(0.0, self.exchanged_s - self.alone_s)

    @property
    def exchange_share(self) -> float:
        """Share of the round's time that the exchange adds."""
        return self.exchange_s / (self.steps * self.step_s) if self.exchange_s else 0.0

    def steps_for(self, share: float) -> int | None:
        """Returns with how many steps a round the same exchange takes at most a share of the time.

        None: no number is enough, as steps take no time.
        """
        if not self.exchange_s:
            return 1
        if not self.alone_s:
            return None
        # A share that is met exactly must not ask for a step more because of the last bit of a product.
        return max(1, math.ceil(self.exchange_s * (1 - share) / (share * self.alone_s) * (1 - 1e-12)))


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A design in a cluster.

    Attributes:
        design: its name.
        workers: how many.
        link_bps: bits a second of every link; None: no limit.
        step_s: predicted seconds of a step, the mean over steps with and without an exchange.
        speedup: over uncompressed training in the same cluster.
    """

    design: str
    workers: int
    link_bps: float | None
    step_s: float
    speedup: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A design in the cluster that was asked about.

    Attributes:
        at: seconds and speed-up there.
        bits_up, bits_down: of a value in a step, the mean over steps with and without an exchange; frames' heads and
            uncompressed tensors included.
        encode_s, decode_s: of a worker's step, likewise the mean, as measured at exchanges.
        free_above_bps: the rate above which a step takes at most 1.05 times as long as without a limit; None where
            latency or messages keep it above that at any rate, 0 where the link never matters.
        pays_below_bps: the rate below which it is faster than uncompressed; infinity: at any. None: not on the
            thinnest link that a plan is of; `at` says whether it is on the one that was asked about.
        exchange_share: of local updates, the share of the time that exchanges add; of other designs None.
        enough_h: of local updates, with how many inner steps that would be at most the share that was asked about; of
            other designs None.
    """

    at: Prediction
    bits_up: float
    bits_down: float
    encode_s: float
    decode_s: float
    free_above_bps: float | None
    pays_below_bps: float | None
    exchange_share: float | None = None
    enough_h: int | None = None
