"""Limits a server's connections to its file descriptors: without a free one it could open no checkpoint."""

from __future__ import annotations

import resource
from contextlib import suppress

KEPT_BACK = 192
"""Descriptors for other uses than workers' connections: files, health probes (64), libraries."""


def room_for(connections: int) -> int:
    """Returns how many of `connections` have descriptors; raises the process's soft limit where it can.

    >>> room_for(10)
    10
    """
    wanted = connections + KEPT_BACK
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):  # a system with further limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return connections if soft < 0 else min(connections, max(soft - KEPT_BACK, soft // 2))
