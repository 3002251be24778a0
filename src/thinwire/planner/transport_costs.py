"""What messages cost besides their bytes on the link, and what processes that share processors take from each other."""

from __future__ import annotations

from dataclasses import dataclass

TCP_PAYLOAD_NBYTES = 1448
TCP_HEADERS_NBYTES = 66
"""Of a packet on Ethernet with IPv4 and TCP timestamps: 1,514 bytes carry 1,448."""


@dataclass(frozen=True, kw_only=True)
class TransportCosts:
    """What messages between a worker and a server cost; the defaults are gRPC's, measured on two cores.

    Args:
        worker_message_s: of a processor for a message at a worker's end, in seconds, beside its computation.
        server_message_s: at a server's end, whose one thread does it between its computations.
        byte_s: of a processor for each byte, at either end.
        latency_s: from a message's last byte on the link to the other program's hands.
    """

    worker_message_s: float = 240e-6
    server_message_s: float = 205e-6
    byte_s: float = 0.3e-9
    latency_s: float = 200e-6


@dataclass(frozen=True, kw_only=True)
class PeerCosts:
    """What messages between ranks cost; the defaults are of machine A (docs/results.md).

    Args:
        message_s: of a rank's processor for a message that it sends or takes, in seconds. Plain DDP of four ranks, 12
            messages in a rank's step, adds 4.5 to 7 ms to its processor time without a limit on the link.
        hop_s: wait of ranks that share processors at each hop of a ring beyond two.
    """

    message_s: float = 350e-6
    hop_s: float = 300e-6


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What processes in lockstep take from each other where they share processors.

    Args:
        slowdown: processor seconds of one's computation beside the others, over those of the same alone; 1 or more.
        use: share of the processors that lockstep keeps in use, above 0 and up to 1.
    """

    slowdown: float = 1.0
    use: float = 1.0

    @property
    def stretch(self) -> float:
        """How many times as long as alone a computation takes."""
        return self.slowdown / self.use
