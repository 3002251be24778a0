"""The model's tensors as a worker sees them: each a copy of float32 values, cut into the slots of its shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.hooks.planning import PlannedTensor
from thinwire.hooks.replica import Replica
from thinwire.hooks.slot import Slot
from thinwire.runtime.session import Session
from thinwire.telemetry import Counters


class Tensor:
    """One tensor of the model at this worker: its copy and its slots.

    Args:
        planned: what it is, and where its pieces live.
        sessions: one with each shard.
        counters: for bytes and seconds.
        seed: of random codecs.
        undoable: whether a push may turn out to have come too late.
        measures: whether the norm of every gradient is followed.
    """

    def __init__(
        self,
        planned: PlannedTensor,
        sessions: Sequence[Session],
        counters: Counters,
        *,
        seed: int,
        undoable: bool,
        measures: bool,
    ) -> None:
        self.name, self.state, self.parameter = planned.name, planned.state, planned.tensor
        self.replica = Replica(planned.tensor)
        self.slots: list[Slot] = []
        for piece in planned.pieces:
            session = sessions[piece.shard]
            shape = session.core.plan.tables[piece.table].shape
            slot = Slot(
                session,
                piece.table,
                self.replica.piece(piece.start, piece.stop, shape),
                slice(piece.start, piece.stop),
                None if planned.state else planned.up,
                counters,
                seed=seed,
                undoable=undoable,
            )
            slot.measures = measures and not planned.state
            self.slots.append(slot)

    def behind(self, *, fully: bool = False) -> bool:
        """Whether a part of the copy lacks more than the policy allows (`fully`: anything)."""
        return any(slot.behind(fully=fully) for slot in self.slots)


def part(gradient: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A slot's share of a tensor's gradient, in the table's shape."""
    if tuple(gradient.shape) == slot.spec.shape:
        return gradient
    return gradient.reshape(-1)[slot.span].reshape(slot.spec.shape)
