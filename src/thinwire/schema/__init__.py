"""The messages of both modes, and the plan that workers and servers agree on. Plain frozen values; no torch.

A message is a struct and, beside it, a tuple of frames: big bytes are never copied into the struct. It travels as an
array of its fields in this order. `KINDS` gives every message the number that travels; numbers are never reused.
Fields are added last, with a default, so that an older reader skips what it does not know.
"""

from __future__ import annotations

from typing import TypeAlias, get_args

from thinwire.schema.exchange import (
    Abort,
    Ahead,
    BatchSizes,
    Changes,
    Delta,
    Join,
    Leave,
    Push,
    Refused,
    Scalars,
    Shard,
    Skip,
    Values,
    Welcome,
)
from thinwire.schema.plan import (
    FROZEN,
    MAX_CODECS,
    MAX_GROUPS,
    MAX_RANK,
    MAX_TABLES,
    Config,
    Plan,
    Reduce,
    Settings,
    TableSpec,
)
from thinwire.schema.sessions import (
    MAX_STEPS,
    Acknowledged,
    Members,
    Offer,
    Resume,
    SessionAccepted,
    SessionOpen,
)

__all__ = [
    "FROZEN",
    "KINDS",
    "MAX_CODECS",
    "MAX_GROUPS",
    "MAX_RANK",
    "MAX_STEPS",
    "MAX_TABLES",
    "Abort",
    "Acknowledged",
    "Ahead",
    "BatchSizes",
    "Changes",
    "Config",
    "Delta",
    "Join",
    "Leave",
    "Members",
    "Message",
    "Offer",
    "Plan",
    "Push",
    "Reduce",
    "Refused",
    "Resume",
    "Scalars",
    "SessionAccepted",
    "SessionOpen",
    "Settings",
    "Shard",
    "Skip",
    "TableSpec",
    "Values",
    "Welcome",
]

Message: TypeAlias = (
    Join
    | Welcome
    | Values
    | Push
    | Delta
    | Leave
    | Refused
    | Scalars
    | SessionOpen
    | SessionAccepted
    | Acknowledged
    | Shard
    | Skip
    | Abort
    | Members
    | Offer
    | Resume
    | Ahead
)

KINDS: dict[int, type[Message]] = dict(zip([*range(1, 18), 22], get_args(Message), strict=True))
"""Messages by the number that travels, in the order of the union above. New ones come last; 18 to 21 stay unused."""
