"""A shard's journal: one JSON line for each gradient that it took and each update that it made, as they travelled.

It is written beside the core and not by it, from the messages themselves, so that the core's arithmetic can be held
against it: every update is of the gradients that came for it, each of them once, and versions grow by one
(`studies.chaos.audit`). A shard that is started again goes on with the same file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from thinwire.runtime.line_file import LineFile
from thinwire.schema import Contribution, Delta, Join, Members, Merged, Message, Offer, Plan, Push, Welcome


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="entry", tag=str.lower, omit_defaults=True):
    """Base class of the lines.

    Args:
        at: seconds since the epoch.
    """

    at: float


class Began(Entry, frozen=True, kw_only=True):
    """The shard's process began, or goes back, with every table at version `step`."""

    step: int = 0


class Planned(Entry, frozen=True, kw_only=True):
    """The shard has a plan.

    Args:
        workers: of the plan.
        tables: how many.
        state: those that are buffers, which are relayed and not updated.
        consistency: name of the policy.
    """

    workers: int
    tables: int
    state: tuple[int, ...] = ()
    consistency: str = "bsp"


class Joined(Entry, frozen=True, kw_only=True):
    """A worker asked to take part."""

    rank: int


class Took(Entry, frozen=True, kw_only=True):
    """A gradient of each of these tables came from a worker, for a clock."""

    rank: int
    step: int
    tables: tuple[int, ...]


class Updated(Entry, frozen=True, kw_only=True):
    """These tables have a new version, made of these workers' gradients; without ranks, of all the plan's."""

    version: int
    tables: tuple[int, ...]
    ranks: tuple[int, ...] = ()


class Changed(Entry, frozen=True, kw_only=True):
    """Somebody came or went; these are expected from now on."""

    ranks: tuple[int, ...]
    reason: str


AnyEntry = Began | Planned | Joined | Took | Updated | Changed


class Journal:
    """Appends to a shard's journal.

    Args:
        path: the file; made if missing, and its folder too.
        step: the version that the shard begins with.

    Raises:
        ConfigError: the file cannot be opened for writing.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "journal"
        >>> journal = Journal(path, step=7)
        >>> journal.received(2, Push(step=7, tables=(0, 1)), None)
        >>> journal.sent(Delta(version=8, tables=(0, 1), ranks=(2,)))
        >>> journal.close()
        >>> [msgspec.json.decode(line)["entry"] for line in path.read_bytes().splitlines()]
        ['began', 'took', 'updated']
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        self._file = LineFile(path, "entries of the journal")
        self._plan: Plan | None = None
        self._going_back = False
        self._write(Began(at=time.time(), step=step))

    def received(self, rank: int, message: Message, plan: Plan | None) -> None:
        """Writes down a push, and who asks to take part; and the shard's plan, where that is new."""
        match message:
            case Join():
                if plan is not None and plan != self._plan:
                    self._plan = plan
                    self._write(_planned(plan))
                self._write(Joined(at=time.time(), rank=rank))
            case Push() | Contribution():
                self._write(Took(at=time.time(), rank=rank, step=message.step, tables=message.tables))

    def sent(self, message: Message) -> None:
        """Writes down what an answer says of an update, or of who takes part."""
        match message:
            case Offer(begin=-1):  # the next one that is let in is let in with all
                self._going_back = True
            case Welcome() if self._going_back:
                self._going_back = False
                self._write(Began(at=time.time(), step=message.step))
            case Delta() | Merged():
                entry = Updated(at=time.time(), version=message.version, tables=message.tables, ranks=message.ranks)
                self._write(entry)
            case Members(interrupted=False):
                self._write(Changed(at=time.time(), ranks=message.ranks, reason=message.reason))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, entry: AnyEntry) -> None:
        self._file.write(msgspec.json.encode(entry))


def _planned(plan: Plan) -> Planned:
    state: Sequence[int] = [index for index, table in enumerate(plan.tables) if table.state]
    return Planned(
        at=time.time(),
        workers=plan.workers,
        tables=len(plan.tables),
        state=tuple(state),
        consistency=plan.consistency,
    )
