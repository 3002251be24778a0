"""One process that has imported what many others need, and forks on request: a start costs a fork, not the imports.

    python fork_server.py DESCRIPTOR LIBRARY…

A request on the socket is JSON with the two ends of the pipes that become standard output and error. The fork enters
the namespaces that the request names, and runs a module as `python -m MODULE …` does. Two answers go back: the process
id, and how it ended. With more than one thread beside the one that forks there are no forks. Each fork has a session
of its own, and is killed with this process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
MAX_NBYTES = 1 << 16  # of a request


class ForkServer:
    """Forks, and says how the forks end."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._numbers: dict[int, int] = {}  # of requests, by process

    def serve(self) -> dict[str, Any] | None:
        """Forks until the other end closes, and returns None; in a fork, returns the request."""
        awake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        sources: list[socket.socket | int] = [self._requests, awake]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if awake in ready:
                os.read(awake, 4096)
                self._reap()
            if self._requests in ready:
                data, descriptors, _, _ = socket.recv_fds(self._requests, MAX_NBYTES, 2)
                if not data:
                    return None
                request: dict[str, Any] = json.loads(data)
                request["pid"], request["streams"] = os.getpid(), descriptors
                if self._fork(request) == 0:
                    signal.set_wakeup_fd(-1)
                    for descriptor in (awake, wake, self._requests.detach()):
                        os.close(descriptor)
                    return request

    def _fork(self, request: dict[str, Any]) -> int:
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            self._answer(request["number"], error=f"{threads} threads run where a fork would have one")
            pid = -1
        else:
            try:
                pid = os.fork()
            except OSError as error:  # no more processes, or no memory, for this one
                self._answer(request["number"], error=str(error.strerror))
                pid = -1
        if pid:
            for descriptor in request["streams"]:
                os.close(descriptor)
        if pid > 0:
            self._numbers[pid] = request["number"]
            self._answer(request["number"], pid=pid)
        return pid

    def _reap(self) -> None:
        while self._numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._answer(self._numbers.pop(pid), status=os.waitstatus_to_exitcode(status))

    def _answer(self, number: int, **what: Any) -> None:
        self._requests.send(json.dumps({"number": number, **what}).encode())


def become(request: dict[str, Any]) -> None:
    """Makes this fork the process that was asked for: its session, streams and namespaces."""
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != request["pid"]:  # it died before the kernel knew what we want
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(request["streams"], start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    folder = os.getcwd()
    for path in request["namespaces"]:
        descriptor = os.open(path, os.O_RDONLY)
        if libc.setns(descriptor, 0):
            code = ctypes.get_errno()
            sys.exit(f"cannot enter {path}: {os.strerror(code)}")
        os.close(descriptor)
    os.chdir(folder)  # a namespace of mounts begins at its root


def main(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Imports and forks; returns None at the end, and in each fork what it is to run."""
    requests = socket.socket(fileno=int(arguments[0]))
    for library in arguments[1:]:
        importlib.import_module(library)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    request = ForkServer(requests).serve()
    if request is not None:
        become(request)
    return request


if __name__ == "__main__":
    asked = main(sys.argv[1:])
    if asked is not None:
        os.environ.update(asked["environment"])
        sys.argv = asked["module"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
