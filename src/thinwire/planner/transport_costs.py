"""What messages cost besides their bytes on the link, and what processes that share processors take from each other."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import ConfigError

TCP_PAYLOAD_NBYTES = 1448
TCP_HEADERS_NBYTES = 66
"""Of a packet on Ethernet with IPv4 and TCP timestamps: 1,514 bytes carry 1,448."""


@dataclass(frozen=True, kw_only=True)
class TransportCosts:
    """What a transport costs besides the bytes on the link.

    Args:
        worker_message_s: of a processor for a message at a worker's end, in seconds; its threads do it while the
            worker computes or waits.
        server_message_s: at a server's end, whose one thread does it between what it computes.
        byte_s: of a processor for each byte, at either end, in seconds.
        latency_s: from a message's last byte on the link to the other program's hands, in seconds.

    The defaults are gRPC's on two cores, as `thinwire bench clock` measured them on 2026-11-22.
    """

    worker_message_s: float = 240e-6
    server_message_s: float = 205e-6
    byte_s: float = 0.3e-9
    latency_s: float = 200e-6


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What processes in lockstep take from each other where they share processors.

    Args:
        slowdown: processor seconds of what one computes beside the others, over those of the same without them.
        use: of the processors, what lockstep leaves in use, above 0 and up to 1.

    Raises:
        ConfigError: a number out of its range.
    """

    slowdown: float = 1.0
    use: float = 1.0

    def __post_init__(self) -> None:
        if not self.slowdown >= 1 or not 0 < self.use <= 1:
            raise ConfigError(f"{self}: a slowdown is 1 or more, and a use above 0 and at most 1")

    @property
    def stretch(self) -> float:
        """How many times as long as alone whatever is computed takes."""
        return self.slowdown / self.use
