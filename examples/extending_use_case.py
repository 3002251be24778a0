"""The use case of Wu 2018 (§4.2): round-robin placement, stale-synchronous training, the top 1 % of every gradient.

There it is three classes and one line of configuration each; here the parts exist, so it is the configuration.
With the entry point of docs/extending.md installed: `thinwire train --design use-case --servers 2 --workers 4`.
"""

from __future__ import annotations

import thinwire as tw
from thinwire.policies.designs import Design


def use_case(staleness: int = 5, fraction: float = 0.01) -> Design:
    """Returns the design; its options are what may stand in brackets, as in `use-case[staleness=2]`."""
    top = tw.codec("topk", fraction=fraction, error_feedback=True)
    return Design(
        name=f"use-case[staleness={staleness},fraction={fraction}]",
        up=top,
        down=top,
        placement="round-robin",
        consistency=f"ssp[staleness={staleness},mode=passive]",
        cite="round-robin, top 1 % with residual, passive SSP (Wu 2018, §4.2)",
    )
