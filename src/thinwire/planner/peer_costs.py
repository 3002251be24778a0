"""What messages between equal ranks cost a processor and the clock, where no server stands between them."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PeerCosts:
    """What ranks' messages cost; the defaults are of machine A (docs/results.md).

    Args:
        message_s: of a rank's processor for a message that it sends or takes, in seconds. Plain DDP of four ranks, 12
            messages in a rank's step, adds 4.5 to 7 ms to its processor time without a limit on the link.
        hop_s: that a ring of ranks which share processors waits at each hop more than an exchange of two hops does, in
            seconds of the clock.

    `bench.peer_costs.measure_peer_costs` measures any machine's.

    Raises:
        ConfigError: seconds that are below 0.
    """

    message_s: float = 350e-6
    hop_s: float = 300e-6

    def __post_init__(self) -> None:
        if not all(each >= 0 for each in (self.message_s, self.hop_s)):  # nor NaN
            raise ConfigError(f"{self}: seconds are 0 or more")
