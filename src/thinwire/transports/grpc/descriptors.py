"""How many connections a server's process has file descriptors for: without any left it could open no checkpoint."""

from __future__ import annotations

import resource
from contextlib import suppress

KEPT_BACK = 192
"""Descriptors for everything but workers' connections: files, probes of health (64), libraries' own."""


def room_for(connections: int) -> int:
    """Returns for how many of so many connections there are descriptors; raises the process's soft limit if it may.

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
