"""How much a server takes from one worker: before it has joined, and then by the plan's shapes.

The transport reads no more of a packet than these bytes, and a packet's head is held against the numbers before
anything else of it is looked at; so neither memory nor time depends on what a peer would like to send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.packets import PacketLimits
from thinwire.schema import Plan

MAX_OPENING_NBYTES = 64 * 1024
"""Of a packet about the session, which holds a name and two numbers."""
MAX_JOIN_NBYTES = 2**20
"""Of a worker's first message: a plan takes some 150 bytes a table. As much memory again for each byte, and more, goes
into what it says, so it is small."""
MAX_KEPT_NBYTES = 512 * 2**20
"""What may wait for a worker's acknowledgement, where its shard is not so large that its values are half of it."""
MAX_ENDED = 1024
"""Sessions that have ended, whose last packet may be asked for again."""
JOIN_TOO_LARGE = f"a first message of more than {MAX_JOIN_NBYTES} bytes: no model of so many tensors can be served"
JOIN_WITHIN_S = 120.0
"""A connection whose worker has not joined by then is ended. Workers connect to all shards, then join."""

VALUE_NBYTES = 16
"""More than any codec takes for a value: an index, a value, and part of a scale, in 64 bits each."""
DOWN_NBYTES = 8
"""Of a value that a worker is sent, float64 at most."""
TABLE_NBYTES = 4096
"""A frame's head, and what a codec sends besides its values."""
MESSAGE_NBYTES, MESSAGE_TABLE_NBYTES, MESSAGE_GROUP_NBYTES = 64 * 1024, 64, 4096
"""Of a message beside its frames: numbers for every table, an optimizer's options for every parameter group."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a worker that has joined may send in one packet.

    Args:
        packet_nbytes: all of it.
        head: what its head may declare.
        kept_nbytes: what may wait for its acknowledgement: all values twice, those of a late one and an update.
    """

    packet_nbytes: int
    head: PacketLimits
    kept_nbytes: int


def allowance(plan: Plan) -> Allowance:
    """Returns what a plan's shapes allow.

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
