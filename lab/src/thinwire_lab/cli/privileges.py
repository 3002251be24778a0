"""What a command lacks to have the kernel make links thin: being root of a user namespace, which it starts again as."""

from __future__ import annotations

import sys

from thinwire.engines.roles import own_command
from thinwire.transports.links import parse_rate
from thinwire_lab.engines.system_tools import can_unshare, reexec_in_user_namespace


def with_privileges(link: str | None, shaping: str) -> None:
    """Starts this command again as root of a user namespace, where that is what kernel shaping lacks."""
    if parse_rate(link or "none").bps is not None and shaping != "application" and can_unshare():
        reexec_in_user_namespace(own_command(*sys.argv[1:]))
