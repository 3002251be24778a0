"""One rank of a benchmark as a process, and what ranks and their launcher say to each other.

A rank reports that it waits, and the launcher opens a gate: a file, which processes in any network namespace see.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from thinwire.engines.events import Event
from thinwire.engines.roles import own_command
from thinwire.errors import EngineError

SILENCE_S = 900.0
"""How long ranks and their launcher wait for each other, in seconds."""
WARM, STOPPED = "warm", "stopped"
"""The gates, in the order in which ranks come to them."""
_POLL_S = 0.01


class Rank(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag=str.lower):
    """Base class of one rank; its fields travel on the process's command line.

    `gate` is the folder of its gates, `server` the address of a parameter server.
    """

    rank: int
    master: str
    gate: str
    server: str | None = None


def rank_command(rank: Rank) -> list[str]:
    """Returns the command of a process that is this rank and reports to us."""
    return own_command("bench", "role", msgspec.json.encode(rank).decode(), "--events")


class Warm(Event, frozen=True, kw_only=True):
    """A rank has warmed up, and waits."""


class Stepped(Event, frozen=True, kw_only=True):
    """Rank 0 has taken a measured step, the last of so many seconds of training."""

    step: int
    seconds: float


class Stopped(Event, frozen=True, kw_only=True):
    """A rank has taken its last measured step, and waits."""


class Gates:
    """Where ranks wait until their launcher lets all of them go on."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def open(self, name: str) -> None:
        """Lets all who wait at this gate, or come to it later, go on."""
        (self._folder / name).touch()

    def wait(self, name: str) -> None:
        """Returns once the gate is open."""
        deadline = time.monotonic() + SILENCE_S
        while not (self._folder / name).exists():
            if time.monotonic() > deadline:
                raise EngineError(f"the launcher did not open the gate {name!r} within {SILENCE_S:g} s")
            time.sleep(_POLL_S)
