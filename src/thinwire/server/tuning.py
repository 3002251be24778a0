"""Codecs that workers choose anew for every exchange: a shard codes its pulls with what they say, once for all of them.

Which codec is best the workers know, who measure; a shard only checks that it is one of the plan's and that what waits
of one codec can go with the next. The notes that workers add for each other it passes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from thinwire.codecs import Codec
from thinwire.errors import ProtocolError
from thinwire.schema import Delta, Plan, Push, TunedDelta, TunedPush
from thinwire.server.downlinks import ModelDelta
from thinwire.server.table import Table

Notes = tuple[tuple[int, bytes], ...]

_KEPT_CLOCKS = 8
"""Nobody is further ahead; what a stranger says of others is forgotten."""


class Tuning:
    """What codec some tables of a shard have in an exchange.

    Args:
        plan: of the shard.
        codecs: the plan's.
        tables: the plan's.
    """

    def __init__(self, plan: Plan, codecs: Sequence[Codec], tables: Sequence[Table]) -> None:
        self._plan, self._codecs, self._tables = plan, codecs, tables
        self._said: dict[int, dict[int, TunedPush]] = {}

    def take(self, rank: int, push: Push) -> None:
        """Takes what a worker says with a push, if it says anything.

        Raises:
            ProtocolError: a codec that the plan does not have, or between which and the planned one nothing can wait.
        """
        if not isinstance(push, TunedPush):
            return
        for index in (push.replaced, push.codec):
            if not 0 <= index < len(self._codecs):
                raise ProtocolError(f"an exchange with codec {index}; the plan has {len(self._codecs)}")
            codec = self._codecs[index]
            if not codec.residual_by_default or codec.random:
                raise ProtocolError(f"an exchange with {codec.id!r}, which keeps no residual, or draws random numbers")
        if not 1 <= push.sparsity < 2:
            raise ProtocolError(f"an exchange with a sparsity multiplier of {push.sparsity}; it lies in [1, 2)")
        for table in self._replaced(push):
            if not isinstance(table.downlink, ModelDelta):
                raise ProtocolError(f"{table.spec.name}: its codec may change where model deltas travel down alone")
            if "senders" in table.reduce and not self._codecs[push.codec].scheme.sends_some:
                raise ProtocolError(
                    f"{table.spec.name}: {self._codecs[push.codec].id!r} sends all values, and its gradients' mean is "
                    "over those who sent a value"
                )
            table.accepted.add(self._codecs[push.codec].id)
        self._said.setdefault(push.step, {})[rank] = push
        while len(self._said) > _KEPT_CLOCKS:
            del self._said[min(self._said)]

    def begin(self, clock: int) -> tuple[bool, Notes]:
        """Sets the codec of the pulls that end a clock's exchange.

        Returns:
            Whether a table has another codec than before; and what is to be passed on to all workers, once.
        """
        said = self._said.pop(clock, None)
        if not said:
            return False, ()
        push, changed = said[min(said)], False
        codec = self._codecs[push.codec]
        for table in self._replaced(push):
            assert isinstance(table.downlink, ModelDelta)
            changed = table.downlink.recode(codec, push.sparsity) or changed
        return changed, tuple((rank, said[rank].note) for rank in sorted(said) if said[rank].note)

    def _replaced(self, push: TunedPush) -> list[Table]:
        return [table for table in self._tables if not table.spec.state and table.spec.down == push.replaced]


def with_notes(delta: Delta, notes: Notes) -> TunedDelta:
    """Returns a delta that passes notes on."""
    return TunedDelta(**msgspec.structs.asdict(delta), notes=notes)
