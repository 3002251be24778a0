"""Limits on the bytes that a server accepts from one worker: before it has joined, and then by the plan's shapes.

The transport reads no more of a packet than these bytes, and a packet's head is checked against the limits before its
body is read. A peer cannot make the server spend more memory or time.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ProtocolError
from thinwire.packets import PacketLimits
from thinwire.quantities import nbytes_text
from thinwire.schema import Plan

MAX_OPENING_NBYTES = 64 * 1024
"""Limit on a packet about the session, which contains a name and a few numbers."""
MAX_JOIN_NBYTES = 2**20
"""Limit on a worker's first message: a plan takes some 150 bytes a table. The limit is small because the decoded
message takes several times the memory."""
MAX_KEPT_NBYTES = 512 * 2**20
"""Limit on packets that wait for a worker's acknowledgement, unless the shard's values need more; see `Allowance`."""
MAX_ENDED = 1024
"""Number of ended sessions that keep their last packet, in case the worker asks for it again."""
JOIN_TOO_LARGE = f"a first message of more than {MAX_JOIN_NBYTES} bytes: no model of so many tensors can be served"
JOIN_WITHIN_S = 120.0
"""A connection on which no worker has joined by then is ended. Workers connect to all shards, then join."""

VALUE_NBYTES = 16
"""More than any codec needs for a value: an index, a value, and part of a scale, in 64 bits each."""
DOWN_NBYTES = 8
"""Size of a value that is sent to a worker: float64 at most."""
TABLE_NBYTES = 4096
"""Limit on a frame's head and a codec's metadata."""
MESSAGE_NBYTES, MESSAGE_TABLE_NBYTES, MESSAGE_GROUP_NBYTES = 64 * 1024, 64, 4096
"""Limits on a message without its frames: numbers for every table, options for every parameter group."""


TABLE_WORKER_NBYTES = 130
"""Memory of a shard's records of one worker and one table."""


def check_memory(plan: Plan) -> None:
    """Raises ProtocolError if a plan needs more memory than this machine has left, before it allocates any.

    The estimate counts the values, the sum of their gradients, and the records of every worker and table.
    """
    values = sum(math.prod(filter(None, spec.shape)) for spec in plan.tables)
    needed, free = 8 * values + TABLE_WORKER_NBYTES * plan.workers * len(plan.tables), free_nbytes()
    if needed > free:
        raise ProtocolError(
            f"a plan for {plan.workers} workers and {len(plan.tables)} tables with {values:,} values needs at least "
            f"{nbytes_text(needed)} of memory at the server, which has {nbytes_text(free)} left"
        )


def free_nbytes() -> float:
    """Returns the bytes of memory that kernel and container leave to this process; inf on systems other than Linux."""
    free = math.inf
    with suppress(OSError, ValueError, IndexError):
        free = 1024.0 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
    with suppress(OSError, ValueError):  # "max" where there is no limit
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits on one packet of a worker that has joined.

    Args:
        packet_nbytes: the whole packet.
        head: the sizes that its head may declare.
        kept_nbytes: the packets that may wait for the worker's acknowledgement: all values twice, once for a late
            worker's model and once for an update.
    """

    packet_nbytes: int
    head: PacketLimits
    kept_nbytes: int


def allowance(plan: Plan) -> Allowance:
    """Returns the limits for a plan's shapes.

    >>> from thinwire.schema import TableSpec
    >>> tables = (TableSpec(name="weight", shape=(100, 10)),)
    >>> plan = Plan(workers=2, tables=tables, codecs=({"id": "fp32"},), optimizer="SGD", groups=({},))
    >>> allowance(plan)
    Allowance(packet_nbytes=93888, head=PacketLimits(frames=2, message_nbytes=69696), kept_nbytes=536870912)
    """
    tables = len(plan.tables)
    values = sum(math.prod(spec.shape) for spec in plan.tables)
    message = MESSAGE_NBYTES + MESSAGE_TABLE_NBYTES * tables + MESSAGE_GROUP_NBYTES * len(plan.groups)
    nbytes = message + VALUE_NBYTES * values + TABLE_NBYTES * (tables + 1)
    kept = max(MAX_KEPT_NBYTES, 2 * (DOWN_NBYTES * values + TABLE_NBYTES * tables))
    return Allowance(nbytes, PacketLimits(frames=tables + 1, message_nbytes=message), kept)
