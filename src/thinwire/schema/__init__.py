"""The messages of both modes, and the plan that workers and servers agree on. Plain frozen values; no torch.

A message is a struct with a separate tuple of frames, so that large bytes are never copied into the struct. It is sent
as an array of its fields in this order. `KINDS` numbers the messages on the wire; numbers are never reused. New fields
come last, with a default, so that an older reader skips unknown ones.
"""

from __future__ import annotations

from thinwire.schema.messages import KINDS as KINDS
from thinwire.schema.messages import MAX_STEPS as MAX_STEPS
from thinwire.schema.messages import Abort as Abort
from thinwire.schema.messages import Acknowledged as Acknowledged
from thinwire.schema.messages import Ahead as Ahead
from thinwire.schema.messages import BatchSizes as BatchSizes
from thinwire.schema.messages import Changes as Changes
from thinwire.schema.messages import Contribution as Contribution
from thinwire.schema.messages import Delta as Delta
from thinwire.schema.messages import Join as Join
from thinwire.schema.messages import Leave as Leave
from thinwire.schema.messages import Members as Members
from thinwire.schema.messages import Merged as Merged
from thinwire.schema.messages import Message as Message
from thinwire.schema.messages import Offer as Offer
from thinwire.schema.messages import Push as Push
from thinwire.schema.messages import Refused as Refused
from thinwire.schema.messages import Resume as Resume
from thinwire.schema.messages import Scalars as Scalars
from thinwire.schema.messages import SessionAccepted as SessionAccepted
from thinwire.schema.messages import SessionOpen as SessionOpen
from thinwire.schema.messages import Shard as Shard
from thinwire.schema.messages import Skip as Skip
from thinwire.schema.messages import Values as Values
from thinwire.schema.messages import Welcome as Welcome
from thinwire.schema.plan import FROZEN as FROZEN
from thinwire.schema.plan import MAX_TABLES as MAX_TABLES
from thinwire.schema.plan import MAX_VALUE as MAX_VALUE
from thinwire.schema.plan import MAX_WORKERS as MAX_WORKERS
from thinwire.schema.plan import Config as Config
from thinwire.schema.plan import Plan as Plan
from thinwire.schema.plan import Reduce as Reduce
from thinwire.schema.plan import Settings as Settings
from thinwire.schema.plan import TableSpec as TableSpec
