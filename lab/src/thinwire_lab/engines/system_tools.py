"""The system's tools for links and namespaces, the way into a namespace, and the right to make one.

A user who is not root takes it from a user namespace of its own, which a command enters by starting itself again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from thinwire.errors import EngineError

TOOLS = ("ip", "tc", "nsenter", "unshare")
WHO_MAY = "run as root, or where `unshare --user --map-root-user --net true` succeeds"
TIMEOUT_S = 20.0
_OPTIONS = {"net": "net", "mnt": "mount"}
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"  # users often lack sbin, where tc is


def can_unshare() -> bool:
    """Whether `reexec_in_user_namespace` would help: we are not root already, and the host lets users be it.

    False for root, so that a re-executed command that still cannot make a fabric does not try again for ever.
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
    """Replaces this process by `argv`, run as root of a new user namespace, before anything is started or opened."""
    unshare = find_tools()["unshare"]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(unshare, [unshare, "--user", "--map-root-user", "--", *argv])
    except OSError as error:
        raise EngineError(f"cannot run {unshare}: {error.strerror}") from error


def entering(namespaces: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` in these namespaces. It keeps its process id and standard streams.

    >>> entering(["/proc/7/ns/net", "/proc/9/ns/mnt"], ["ls"])[1:], entering([], ["ls"])
    (['--net=/proc/7/ns/net', '--mount=/proc/9/ns/mnt', '--', 'ls'], ['ls'])
    """
    if not namespaces:
        return list(argv)
    options = [f"--{_OPTIONS[path.rpartition('/')[2]]}={path}" for path in namespaces]
    return [find_tools()["nsenter"], *options, "--", *argv]


def find_tools() -> dict[str, str]:
    """Where the tools are. Raises EngineError naming those that are missing."""
    found = {tool: shutil.which(tool) or shutil.which(tool, path=_SYSTEM_PATH) for tool in TOOLS}
    missing = [tool for tool, path in found.items() if path is None]
    if missing:
        raise EngineError(f"cannot shape links: {', '.join(missing)} not found; install iproute2 and util-linux")
    return {tool: path for tool, path in found.items() if path is not None}


def run_tool(argv: Sequence[str], text: str = "") -> str:
    """Run a tool to its end and return its output. Raises EngineError with what it complained of."""
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"cannot shape links: {' '.join(argv)}: {error}") from error
    if done.returncode != 0:
        complaint = (done.stderr or done.stdout).strip()
        hint = f"; {WHO_MAY}" if "not permitted" in complaint else ""
        raise EngineError(f"cannot shape links: {' '.join(argv)}: {complaint}{hint}")
    return done.stdout
