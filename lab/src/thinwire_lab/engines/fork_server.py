"""One process that imports libraries once and forks on request: a start costs a fork, not the imports.

    python fork_server.py DESCRIPTOR LIBRARY…

A request on the socket is JSON with three pipes: standard output, standard error, and the status. The fork enters the
requested namespaces and runs a module like `python -m MODULE …`, in a separate session. A process between the server
and the fork writes the fork's process id to the status, and at last its exit status. If the server ends, both end.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
MAX_NBYTES = 1 << 16  # of a request
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with(parent: int) -> None:
    """Kills this process at the end of its parent."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Forks until the other end closes, and returns None; in a fork, returns the request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects ended processes
    while True:
        data, pipes, _, _ = socket.recv_fds(requests, MAX_NBYTES, 3)
        if not data:
            return None
        server, status = os.getpid(), pipes[2]
        try:
            if (threads := len(os.listdir("/proc/self/task"))) > 1:
                raise OSError(f"{threads} threads run where a fork would have one")
            watcher = os.fork()
        except OSError as error:  # also a limit of processes or memory
            os.write(status, f"{error}\n".encode())
        else:
            if watcher == 0:
                requests.close()
                _end_with(server)
                return _fork(json.loads(data), pipes)
        for pipe in pipes:
            os.close(pipe)


def _fork(request: dict[str, Any], pipes: Sequence[int]) -> dict[str, Any]:
    """Forks, and reports the fork's end; returns in the fork alone, with its session, streams and namespaces."""
    *outputs, status = pipes
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watcher = os.getpid()
    if fork := os.fork():
        for output in outputs:
            os.close(output)
        os.write(status, f"{fork}\n".encode())
        os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])}\n".encode())
        os._exit(0)
    os.close(status)
    os.setsid()
    _end_with(watcher)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    for path in request["namespaces"]:
        descriptor = os.open(path, os.O_RDONLY)
        if _libc.setns(descriptor, 0):
            sys.exit(f"cannot enter {path}: {os.strerror(ctypes.get_errno())}")
        os.close(descriptor)
    return request


def main(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Imports libraries and forks; returns None at the end, and in each fork the request."""
    requests = socket.socket(fileno=int(arguments[0]))
    for library in arguments[1:]:
        importlib.import_module(library)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    return serve(requests)


if __name__ == "__main__":
    asked = main(sys.argv[1:])
    if asked is not None:
        os.environ.update(asked["environment"])
        sys.argv = asked["module"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
