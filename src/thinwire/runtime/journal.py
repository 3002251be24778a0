"""A shard's journal: one JSON line for each gradient that it received and each update that it sent.

The journal is written from the messages and not by the core, so that an audit can check the core: every update
contains the gradients received for it, each once, and versions grow by one. A restarted shard appends to the same file.
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
    """The shard's process began, or resumed from an earlier step, with every table at version `step`."""

    step: int = 0


class Planned(Entry, frozen=True, kw_only=True):
    """The shard has a plan.

    Args:
        workers: number of workers in the plan.
        tables: number of tables.
        state: the tables that are buffers, which are relayed and not updated.
        consistency: name of the policy.
    """

    workers: int
    tables: int
    state: tuple[int, ...] = ()
    consistency: str = "bsp"


class Joined(Entry, frozen=True, kw_only=True):
    """A worker asked to join."""

    rank: int


class Took(Entry, frozen=True, kw_only=True):
    """A worker's gradient of each of these tables was received, for a clock."""

    rank: int
    step: int
    tables: tuple[int, ...]


class Updated(Entry, frozen=True, kw_only=True):
    """These tables have a new version, from these workers' gradients; without ranks, from all workers of the plan."""

    version: int
    tables: tuple[int, ...]
    ranks: tuple[int, ...] = ()


class Changed(Entry, frozen=True, kw_only=True):
    """A worker joined or left; these are expected from now on."""

    ranks: tuple[int, ...]
    reason: str


AnyEntry = Began | Planned | Joined | Took | Updated | Changed


class Journal:
    """Appends to a shard's journal.

    Args:
        path: the file; created if missing, with its folder.
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
        self._resuming = False
        self._write(Began(at=time.time(), step=step))

    def received(self, rank: int, message: Message, plan: Plan | None) -> None:
        """Writes down a push or a join, and the shard's plan if it is new."""
        match message:
            case Join():
                if plan is not None and plan != self._plan:
                    self._plan = plan
                    self._write(_planned(plan))
                self._write(Joined(at=time.time(), rank=rank))
            case Push() | Contribution():
                self._write(Took(at=time.time(), rank=rank, step=message.step, tables=message.tables))

    def sent(self, message: Message) -> None:
        """Writes down an update or a change of members that an answer announces."""
        match message:
            case Offer(begin=-1):  # the next `Welcome` is for all workers
                self._resuming = True
            case Welcome() if self._resuming:
                self._resuming = False
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
