"""The roles of a benchmark's processes, and what ranks and their launcher say to each other.

A rank reports that it waits, and the launcher opens a gate: a file, which processes in any network namespace see.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from thinwire.engines.events import Event
from thinwire.engines.roles import own_command
from thinwire.errors import EngineError
from thinwire.transports.grpc import GrpcOptions

SILENCE_S = 900.0
"""How long ranks and their launcher wait for each other, in seconds."""
WARM, STOPPED = "warm", "stopped"
"""The gates, in the order in which ranks come to them."""
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Stage:
    """What the command line of a benchmark's process gives it."""

    report: Callable[[Event], None]
    listen: str
    transport: GrpcOptions


class Role(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag=str.lower):
    """Base class of what one process of a benchmark does; its fields travel on the process's command line."""

    def command(self) -> list[str]:
        """Returns the `thinwire` command of the process."""
        return ["bench", "role", msgspec.json.encode(self).decode()]


def role_command(role: Role) -> list[str]:
    """Returns the command of a process that plays a role and reports to us."""
    return own_command(*role.command(), "--events")


def join(master: str, *, rank: int, ranks: int, silence_s: float) -> None:
    """Joins the process group of all ranks, and leaves this process one thread to compute on."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{master}", rank=rank, world_size=ranks, timeout=timedelta(seconds=silence_s)
    )


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
