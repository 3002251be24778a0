"""The first program of every child: it ties the child's life to its launcher's, then executes the command.

A killed launcher cannot clean up, so the kernel does it: on Linux a process may ask to be killed when its parent dies,
also after `exec`. A separate program is safe in a launcher with threads, unlike code between fork and exec. On other
systems the command runs untied.

Python runs this file by its path, without site packages, in about 15 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def with_parent_watch(argv: Sequence[str]) -> list[str]:
    """Returns the command that runs `argv` as a child of this process, which cannot outlive it.

    The kernel watches the *thread* that starts the child: start it from one that lives as long as the child
    should. The command keeps its process id, its standard streams and its exit status.

    Example:
        >>> import subprocess
        >>> subprocess.run(with_parent_watch(["echo", "hello"]), capture_output=True, text=True).stdout
        'hello\\n'
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *argv]


def main(arguments: Sequence[str]) -> None:
    """Ties this process to its parent, the first argument's process id, and executes the other arguments."""
    parent, command = int(arguments[0]), list(arguments[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
