"""How an engine makes a process of a command: by starting the program, or by a fork of one that has imported it.

Both enter the namespaces that they are told (`/proc/PID/ns/net`), set the same environment, and tie the process's life
to this one's. A fork is for commands that start the same Python module again and again: `fork_server`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from thinwire.engines.parent_watch import with_parent_watch
from thinwire.errors import EngineError
from thinwire_lab.engines import fork_server
from thinwire_lab.engines.system_tools import entering

START_S = 120.0  # how long the imports may take


def _module_of(argv: Sequence[str]) -> list[str] | None:
    """Returns the module that a command runs by this Python, and its arguments; None where it is no module."""
    starts = ([sys.executable, *flags, "-m"] for flags in ((), ("-P",)))
    return next((list(argv[len(start) :]) for start in starts if list(argv[: len(start)]) == start), None)


class Programs:
    """Starts every command as a program, in a session of its own and in these namespaces."""

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], namespaces: Sequence[str]
    ) -> subprocess.Popen[str]:
        # `env` sets them in the child: this process need not read its own environment to add to it.
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
    """A process that the fork server has been asked for."""

    def __init__(self, streams: Sequence[IO[str]]) -> None:
        self.stdout, self.stderr = streams
        self.pid, self.error = -1, ""
        self.answered, self._ended = threading.Event(), threading.Event()
        self._status: int | None = None

    def take(self, answer: Mapping[str, Any]) -> None:
        if "status" in answer:
            self._status = answer["status"]
            self._ended.set()
            return
        self.pid, self.error = answer.get("pid", -1), answer.get("error", "")
        self.answered.set()

    def poll(self) -> int | None:
        return self._status

    def wait(self) -> int:
        self._ended.wait()
        assert self._status is not None
        return self._status


class Forks:
    """Starts commands `python -m MODULE …` as forks of one process that has imported what they need."""

    def __init__(self, libraries: Sequence[str], environment: Mapping[str, str]) -> None:
        self._programs, self._number = Programs(), 0
        self._forks: dict[int, _Fork] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, fork_server.__file__, str(theirs.fileno()), *libraries]
        with theirs:
            self._server = subprocess.Popen(
                with_parent_watch(["env", *(f"{key}={value}" for key, value in environment.items()), *command]),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._reader = threading.Thread(target=self._read, name="ends of forks", daemon=True)
        self._reader.start()

    def start(self, argv: Sequence[str], environment: Mapping[str, str], namespaces: Sequence[str]) -> Process:
        if (module := _module_of(argv)) is None:
            return self._programs.start(argv, environment, namespaces)
        pipes = [os.pipe() for _ in range(2)]
        fork = _Fork([open(end, encoding="utf-8", errors="replace") for end, _ in pipes])  # noqa: SIM115
        self._number += 1
        self._forks[self._number] = fork
        request: dict[str, Any] = {"number": self._number, "module": module}
        request |= {"environment": dict(environment), "namespaces": list(namespaces)}
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [end for _, end in pipes])
        except OSError as error:
            fork.take({"error": f"the process that forks is gone: {error}"})
        finally:
            for _, end in pipes:
                os.close(end)
        if not fork.answered.wait(START_S):
            fork.error = f"no answer within {START_S:g} s"
        if fork.pid < 0:
            fork.stdout.close()
            fork.stderr.close()
            raise EngineError(f"cannot fork {module[0]}: {fork.error}")
        return fork

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        self._reader.join()
        self._socket.close()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        """Takes the server's answers, until it is gone: then all of its forks are."""
        with suppress(ConnectionResetError):  # it has gone with a request unread
            while data := self._socket.recv(fork_server.MAX_NBYTES):
                answer = json.loads(data)
                self._forks[answer["number"]].take(answer)
                if "pid" not in answer:
                    del self._forks[answer["number"]]
        for fork in self._forks.values():
            fork.take({"error": "the process that forks is gone; its last words are above"})
            fork.take({"status": -signal.SIGKILL})


Process = subprocess.Popen[str] | _Fork
Starter = Programs | Forks  # makes processes; OSError or EngineError where one cannot be started
