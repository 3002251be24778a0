"""A worker's measurement of its links: bytes that all shards send back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from thinwire.policies.autopilot.pilot import Pilot
from thinwire.worker.conversation import Conversation
from thinwire.worker.effects import Procedure

_SIZES = tuple(1 << power for power in range(14, 24, 2))
_ENOUGH_S = 0.04
"""Echoes that take so long tell the rate of a link, also where busy processors delay each by 10 ms or two."""
_TRIES = 3


class LinkProbe:
    """Measures the links to some shards, all at the same time.

    Args:
        conversations: one for each shard.
        now: returns a time in seconds.

    Attributes:
        taken_s: seconds of a measurement in the exchange under way, which its owner sets to 0 when the next begins.
    """

    def __init__(self, conversations: Sequence[Conversation], now: Callable[[], float]) -> None:
        self._conversations, self._now = conversations, now
        self._number = 0
        self.taken_s = 0.0

    def measure(self, pilot: Pilot) -> Procedure[float]:
        """Returns bits per second. Busy processors make a link look slower, never faster: what is slow is tried again.

        Args:
            pilot: knows what the link had before.
        """
        began, best = self._now(), 0.0
        for _ in range(_TRIES):
            best = max(best, (yield from self._echo()))
            if best > pilot.memory.link_bps or not pilot.surprising(best):
                break
        self.taken_s = self._now() - began
        return best

    def _echo(self) -> Procedure[float]:
        """Returns bits per second, both ways together, of echoes that grow until it shows."""
        rate, most = 0.0, min(_most_nbytes(each) for each in self._conversations)
        for nbytes in [each for each in _SIZES if each <= most] or [most]:
            self._number += 1
            began = self._now()
            for conversation in self._conversations:
                yield from conversation.echo(self._number, nbytes)
            for conversation in self._conversations:
                yield from conversation.echoed(self._number)
            taken = max(1e-9, self._now() - began)
            rate = 8 * 2 * nbytes * len(self._conversations) / taken
            if taken >= _ENOUGH_S:
                break
        return rate


def _most_nbytes(conversation: Conversation) -> int:
    """The longest echo: no longer than the shard's tables uncompressed, which it takes in one packet."""
    return 4096 + 4 * sum(math.prod(spec.shape) for spec in conversation.plan.tables)
