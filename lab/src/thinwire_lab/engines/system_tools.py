"""The system's tools for links and namespaces, and the right to make a namespace.

A command of another user than root gets this right by a restart as root of a new user namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from thinwire.engines.roles import own_command
from thinwire.errors import EngineError
from thinwire.transports.links import parse_rate

TOOLS = ("ip", "tc", "nsenter", "unshare")
WHO_MAY = "run as root, or where `unshare --user --map-root-user --net true` succeeds"
TIMEOUT_S = 20.0
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"  # users often lack sbin, where tc is


def can_unshare() -> bool:
    """Returns whether `reexec_in_user_namespace` would help: the user is not root, and the host allows it.

    It is False for root, so that a restarted command without the right does not restart again.
    """
    if os.geteuid() == 0 or sys.platform != "linux":
        return False
    try:
        unshare = find_tools()["unshare"]
        run_tool([unshare, "--user", "--map-root-user", unshare, "--net", "true"])
    except EngineError:
        return False
    return True


def reexec_in_user_namespace(argv: Sequence[str]) -> NoReturn:
    """Replaces this process by `argv`, run as root of a new user namespace."""
    unshare = find_tools()["unshare"]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(unshare, [unshare, "--user", "--map-root-user", "--", *argv])
    except OSError as error:
        raise EngineError(f"cannot run {unshare}: {error.strerror}") from error


def with_privileges(link: str | None, shaping: str) -> None:
    """Restarts this command as root of a user namespace, if kernel shaping needs it."""
    if parse_rate(link or "none").bps is not None and shaping != "application" and can_unshare():
        reexec_in_user_namespace(own_command(*sys.argv[1:]))


def entering(namespaces: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Returns the command that runs `argv` in these namespaces, with its process id and standard streams.

    >>> entering(["/proc/7/ns/net"], ["ls"])[1:], entering([], ["ls"])
    (['--net=/proc/7/ns/net', '--', 'ls'], ['ls'])
    """
    if not namespaces:
        return list(argv)
    return [find_tools()["nsenter"], *(f"--net={path}" for path in namespaces), "--", *argv]


def find_tools() -> dict[str, str]:
    """Returns the tools' paths. Raises EngineError with the missing tools."""
    found = {tool: shutil.which(tool) or shutil.which(tool, path=_SYSTEM_PATH) for tool in TOOLS}
    missing = [tool for tool, path in found.items() if path is None]
    if missing:
        raise EngineError(f"cannot shape links: {', '.join(missing)} not found; install iproute2 and util-linux")
    return {tool: path for tool, path in found.items() if path is not None}


def run_tool(argv: Sequence[str], text: str = "") -> str:
    """Runs a tool and returns its output. Raises EngineError with its error message."""
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"cannot shape links: {' '.join(argv)}: {error}") from error
    if done.returncode != 0:
        complaint = (done.stderr or done.stdout).strip()
        hint = f"; {WHO_MAY}" if "not permitted" in complaint else ""
        raise EngineError(f"cannot shape links: {' '.join(argv)}: {complaint}{hint}")
    return done.stdout
