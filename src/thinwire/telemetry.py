"""Counters that every station may bump.

A `Counters` is a plain bag of named sums. It knows nothing of processes or files: whoever owns one
reads it with `snapshot()` and decides where the numbers go.
"""

from __future__ import annotations

from collections import defaultdict


class Counters:
    """Named sums, added to from one thread at a time.

    >>> counters = Counters()
    >>> counters.add("payload_bytes_push", 3); counters.add("payload_bytes_push", 4)
    >>> counters.snapshot()
    {'payload_bytes_push': 7}
    """

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(int)

    def add(self, name: str, amount: float) -> None:
        """Adds `amount` to the sum called `name` (created at 0)."""
        self._sums[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._sums.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """Returns a copy of every sum, by name."""
        return dict(self._sums)
