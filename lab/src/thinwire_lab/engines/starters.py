"""Two ways in which an engine starts a command's process: as a program, or as a fork of a process with its imports.

Both enter the given namespaces (`/proc/PID/ns/net`), set the same environment, and end the process with this one. Forks
are for commands that start one Python module many times: `fork_server`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache

from thinwire.engines.engine import ENVIRONMENT
from thinwire.engines.parent_watch import with_parent_watch
from thinwire.errors import EngineError
from thinwire_lab.engines import fork_server
from thinwire_lab.engines.system_tools import entering

START_S = 120.0  # how long the imports may take
LIBRARIES = (
    *("thinwire.cli.main", "thinwire.cli.server", "thinwire.runtime.serving", "thinwire.transports.grpc.server"),
    *("thinwire_lab.cli.commands", "thinwire_lab.cli.worker", "thinwire_lab.cli.bench", "thinwire_lab.bench.ranks"),
    *("thinwire_lab.jobs.training", "thinwire.runtime.connection", "torch._dynamo"),
)
"""The libraries of servers, workers and ranks; torch imports the last one when it makes an optimizer."""


def _module_of(argv: Sequence[str]) -> list[str] | None:
    """Returns the module of a command `python -m MODULE …` and its arguments; None for other commands."""
    starts = ([sys.executable, *flags, "-m"] for flags in ((), ("-P",)))
    return next((list(argv[len(start) :]) for start in starts if list(argv[: len(start)]) == start), None)


class Programs:
    """Starts every command as a program, in a separate session and in the given namespaces."""

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], namespaces: Sequence[str]
    ) -> subprocess.Popen[str]:
        # `env` sets the variables in the child, so that this process does not read its environment.
        command = ["env", *(f"{key}={value}" for key, value in environment.items()), *argv]
        return subprocess.Popen(
            with_parent_watch(entering(namespaces, command)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )


class _Fork:
    """A process of the fork server, which writes its id and later its exit status into a pipe."""

    def __init__(self, pipes: Sequence[int]) -> None:
        self.stdout, self.stderr, self._results = (
            open(pipe, encoding="utf-8", errors="replace")  # noqa: SIM115
            for pipe in pipes
        )
        answered, _, _ = select.select([self._results], [], [], START_S)
        answer = self._results.readline().strip() if answered else f"no answer within {START_S:g} s"
        if not answer.isdigit():
            for each in (self.stdout, self.stderr, self._results):
                each.close()
            raise EngineError(answer or "the process that forks is gone; its last output is above")
        self.pid = int(answer)
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._status

    def wait(self) -> int:
        if self._status is None:
            with self._results:
                self._status = int(self._results.readline() or -signal.SIGKILL)
        return self._status


class Forks(AbstractContextManager["Forks"]):
    """Starts commands `python -m MODULE …` as forks of one process with their imports."""

    def __init__(self, libraries: Sequence[str], environment: Mapping[str, str]) -> None:
        self._programs = Programs()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, fork_server.__file__, str(theirs.fileno()), *libraries]
        with theirs:
            self._server = subprocess.Popen(
                with_parent_watch(["env", *(f"{key}={value}" for key, value in environment.items()), *command]),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def start(self, argv: Sequence[str], environment: Mapping[str, str], namespaces: Sequence[str]) -> Process:
        if (module := _module_of(argv)) is None:
            return self._programs.start(argv, environment, namespaces)
        request = {"module": module, "environment": dict(environment), "namespaces": list(namespaces)}
        pipes = [os.pipe() for _ in range(3)]
        with suppress(OSError):  # the server is gone: the pipes are empty
            socket.send_fds(self._socket, [json.dumps(request).encode()], [end for _, end in pipes])
        for _, end in pipes:
            os.close(end)
        try:
            return _Fork([end for end, _ in pipes])
        except EngineError as error:
            raise EngineError(f"cannot fork {module[0]}: {error}") from error

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        self._socket.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def forks() -> Forks:
    """Returns this program's fork server, which starts at the first call and ends with the program.

    A new process imports a role's libraries in three seconds of processor time; a fork takes a hundredth of that.
    """
    made = Forks(LIBRARIES, ENVIRONMENT)
    atexit.register(made.close)
    return made


Process = subprocess.Popen[str] | _Fork
Starter = Programs | Forks  # makes processes; OSError or EngineError where one cannot be started
