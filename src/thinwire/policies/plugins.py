"""What other packages offer under our entry points, looked up once a process.

Reading the metadata of every installed package takes tens of milliseconds and a training names policies many times, so
the list is kept. It holds names alone: an entry is imported by whoever wants it. Nothing here knows what a policy is.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points


@cache
def plugins(group: str) -> tuple[EntryPoint, ...]:
    """Returns the entry points of a group, such as `thinwire.placement`, as they were at the first call.

    >>> plugins("thinwire.none-of-ours")
    ()
    """
    return tuple(entry_points(group=group))
