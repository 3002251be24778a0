"""Who of several ranks has come: asked through the store by which torch's process groups meet, before they block there.

A new process group waits for all its ranks, half an hour unless told otherwise, and says of none that it is missing.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from thinwire.errors import TransportError

PATIENCE_S = 30.0
"""After so long it is logged who is missing: a rank may still be reading its data."""
POLL_S = (0.001, 0.25)
"""Between two looks: the first, which grows to the last."""

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What all ranks write to and read from, as `torch.distributed.Store`."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a number, which begins at 0, and returns it."""

    def set(self, key: str, value: str, /) -> None:
        """Writes a value."""

    def get(self, key: str, /) -> bytes:
        """Returns a value that has been written."""

    def check(self, keys: list[str], /) -> bool:
        """Returns whether all of these have been written."""


def roll_call(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    *,
    patience_s: float = PATIENCE_S,
) -> str:
    """Waits until all ranks have called this equally often, and logs once who keeps the others waiting for long.

    Args:
        store: of the default process group.
        rank: this one, of all.
        ranks: their global ranks, the same list everywhere, this one among them.
        timeout: how long to wait.
        patience_s: after how many seconds to log.

    Returns:
        A name that these ranks and no others have from this call: what begins with it in the store is theirs.

    Raises:
        TransportError: some did not come in time; the message names them.
        RuntimeError: the store is gone, and with it the rank that holds it.
    """
    # Counted in the store: a process that takes a lost one's place finds a new store, as the others do.
    who = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    meeting = f"thinwire/{who}/{store.add(f'thinwire/{who}/calls/{rank}', 1)}"
    store.set(f"{meeting}/{rank}", "here")
    begun, (pause_s, longest_s), told = time.monotonic(), POLL_S, False
    while not store.check([f"{meeting}/{each}" for each in ranks]):
        waited_s = time.monotonic() - begun
        if waited_s >= timeout.total_seconds():
            missing = _missing(store, meeting, ranks)
            raise TransportError(
                f"{missing} did not come within {timeout.total_seconds():g} s; every rank must call compress"
            )
        if waited_s >= patience_s and not told:
            told, missing = True, _missing(store, meeting, ranks)
            text = (
                f"{missing} kept rank {rank} waiting for {waited_s:.0f} s: every rank must call compress; "
                f"waiting for up to {timeout.total_seconds():g} s"
            )
            _log.warning("%s", text)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return meeting


def _missing(store: Store, meeting: str, ranks: Sequence[int]) -> str:
    """Returns who has not come, for a message."""
    return _named([each for each in ranks if not store.check([f"{meeting}/{each}"])])


def _named(ranks: Sequence[int]) -> str:
    """Returns ranks for a message; none are left where the last one came just now.

    >>> _named([2]), _named([2, 3]), _named([])
    ('rank 2', 'ranks 2, 3', 'a rank')
    """
    if not ranks:
        return "a rank"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
