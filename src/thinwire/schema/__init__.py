"""The messages of both modes, and the plan that workers and servers agree on. Plain frozen values; no torch.

A message is a struct and, beside it, a tuple of frames: big bytes are never copied into the struct. It travels as an
array of its fields in this order. `KINDS` gives every message the number that travels; numbers are never reused.
Fields are added last, with a default, so that an older reader skips what it does not know.
"""

from __future__ import annotations

from typing import TypeAlias, get_args

from thinwire.schema.exchange import (
    MAX_NOTE_NBYTES,
    Abort,
    Ahead,
    BatchSizes,
    Changes,
    Delta,
    Echo,
    Join,
    Leave,
    Push,
    Refused,
    Scalars,
    Shard,
    Skip,
    TunedDelta,
    TunedPush,
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
    Saved,
    SessionAccepted,
    SessionOpen,
)

__all__ = [
    "FROZEN",
    "KINDS",
    "MAX_CODECS",
    "MAX_GROUPS",
    "MAX_NOTE_NBYTES",
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
    "Echo",
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
    "Saved",
    "Scalars",
    "SessionAccepted",
    "SessionOpen",
    "Settings",
    "Shard",
    "Skip",
    "TableSpec",
    "TunedDelta",
    "TunedPush",
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
    | Saved
    | TunedPush
    | TunedDelta
    | Echo
    | Ahead
)

KINDS: dict[int, type[Message]] = dict(enumerate(get_args(Message), start=1))
"""Messages by the number that travels: a message's place in the union above, from 1. New ones come last."""
