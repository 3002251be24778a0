"""What leads a worker that joins late, or comes back, from the versions it has to the shard's."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.errors import ProtocolError
from thinwire.schema import Delta, Values
from thinwire.server.steps import Steps, Word
from thinwire.server.table import Table


def catch_up(steps: Steps, rank: int, have: Sequence[int]) -> list[Word]:
    """Returns deltas where the tables' logs have them, else whole tables.

    Args:
        steps: the shard's tables.
        rank: whose.
        have: the version it has of each table; anything else says that it has nothing.

    Raises:
        ProtocolError: it is ahead of the shard, or lacks updates that nobody can give it any more.
    """
    tables = steps.tables
    versions = have if len(have) == len(tables) else (-1,) * len(tables)
    words: list[Word] = []
    whole = []
    for table, version in zip(tables, versions, strict=True):
        if version > table.version:
            raise ProtocolError(
                f"worker {rank} has version {version} of {table.spec.name!r}, and this shard was resumed at version "
                f"{table.version}: resume all workers and shards from the same step"
            )
        unknown = steps.plan.downlink == "gradient" and not table.spec.state and table.version > 0
        if unknown and version < table.version:
            raise ProtocolError(
                f"worker {rank} has version {max(0, version)} of {table.spec.name!r} and the others {table.version}; "
                "under this design the workers hold the model, and the server cannot give it to one that begins or "
                "comes back late: resume all workers and shards from the same step"
            )
    for index, (table, version) in enumerate(zip(tables, versions, strict=True)):
        missing = table.since(version) if version >= 0 and not steps.terms.immediate else None
        if missing is None:
            whole.append(index)
            continue
        first = table.version - len(missing) + 1
        for offset, frame in enumerate(missing):
            words.append(Word(Delta(version=first + offset, tables=(index,)), (frame,), rank))
    if whole:
        give = Table.hand_over if steps.terms.immediate else Table.snapshot
        frames = tuple(give(tables[index], rank) for index in whole)
        message = Values(tables=tuple(whole), versions=tuple(tables[index].version for index in whole))
        words.append(Word(message, frames, rank))
    return words
