"""Costs of messages besides their bytes on the link, and of processes that share processors."""

from __future__ import annotations

from dataclasses import dataclass

TCP_PAYLOAD_NBYTES = 1448
TCP_HEADERS_NBYTES = 66
"""Of a packet on Ethernet with IPv4 and TCP timestamps: 1,514 bytes carry 1,448."""
RANK_MESSAGE_S = 350e-6
"""Seconds of a rank's processor for a message that it sends or receives (machine A in docs/results.md). Plain DDP of
four ranks, 12 messages in a rank's step, adds 4.5 to 7 ms to its processor time without a limit on the link."""
HOP_S = 300e-6
"""Wait of ranks that share processors at each hop of a ring beyond two."""
SHARED_USE = 0.9
"""Share of shared processors that lockstep keeps in use: the median of seven runs without a limit on the link, four
ranks on two cores (docs/results.md, DDP hooks), 0.85 to 0.96."""


@dataclass(frozen=True, kw_only=True)
class TransportCosts:
    """Costs of messages between a worker and a server; the defaults are gRPC's, measured on two cores.

    Args:
        worker_message_s: seconds of a worker's processor for a message, beside its computation.
        server_message_s: the same at a server, whose one thread does it between its computations.
        byte_s: seconds of a processor for each byte, at either end.
        latency_s: seconds from a message's last byte on the link to the receiving program.
    """

    worker_message_s: float = 240e-6
    server_message_s: float = 205e-6
    byte_s: float = 0.3e-9
    latency_s: float = 200e-6
