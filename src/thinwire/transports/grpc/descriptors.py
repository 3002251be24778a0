"""How many connections a server's process has file descriptors for.

Each connection takes one, also a stranger's that says nothing. Where they ran out before the limit on connections is
reached, a server could open nothing else either: no checkpoint, no token file.
"""

from __future__ import annotations

import resource
from contextlib import suppress

KEPT_BACK = 192
"""Descriptors for everything but workers' connections: files, probes of health (64), libraries' own."""


def room_for(connections: int) -> int:
    """Returns for how many connections there are descriptors; the process's soft limit is raised where it may be.

    Args:
        connections: so many are wanted.

    Returns:
        As many, or what is left of the hard limit; of a very low one half.

    Example:
        >>> room_for(10)
        10
    """
    wanted = connections + KEPT_BACK
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):  # a system with limits besides
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return connections if soft < 0 else min(connections, max(soft - KEPT_BACK, soft // 2))
