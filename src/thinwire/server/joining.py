"""What leads a worker that joins late, or resumes, from the versions it has to the shard's."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.errors import ProtocolError
from thinwire.schema import Values
from thinwire.server.table import Table
from thinwire.server.update_engine import Outgoing, UpdateEngine


def catch_up(engine: UpdateEngine, rank: int, have: Sequence[int]) -> list[Outgoing]:
    """Returns the whole tables that a worker lacks.

    Args:
        engine: has the shard's tables.
        rank: whose.
        have: the version it has of each table; anything else says that it has nothing.

    Raises:
        ProtocolError: it is ahead of the shard, or lacks updates that nobody can give it any more.
    """
    tables = engine.tables
    versions = have if len(have) == len(tables) else (-1,) * len(tables)
    for table, version in zip(tables, versions, strict=True):
        if version > table.version:
            raise ProtocolError(
                f"worker {rank} has version {version} of {table.spec.name!r}, and this shard was resumed at version "
                f"{table.version}: resume all workers and shards from the same step"
            )
        unknown = engine.plan.downlink == "gradient" and not table.spec.state and table.version > 0
        if unknown and version < table.version:
            raise ProtocolError(
                f"worker {rank} has version {max(0, version)} of {table.spec.name!r} and the others {table.version}; "
                "under this design the workers hold the model, and the server cannot give it to one that begins or "
                "comes back late: resume all workers and shards from the same step"
            )
    lacks = [i for i, table in enumerate(tables) if versions[i] < table.version or engine.terms.immediate]
    if not lacks:
        return []
    give = Table.hand_over if engine.terms.immediate else Table.snapshot
    frames = tuple(give(tables[index], rank) for index in lacks)
    return [Outgoing(Values(tables=tuple(lacks), versions=tuple(tables[i].version for i in lacks)), frames, rank)]
