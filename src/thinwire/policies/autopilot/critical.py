"""Critical phases, in which s stays 1: a training's first steps, and those after its gradients have grown suddenly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from thinwire.policies.autopilot.levels import Level
from thinwire.policies.autopilot.memory import Memory
from thinwire.policies.autopilot.notes import StepNote

GUARD, JUMP = 20, 2.0
"""Steps in which s stays 1: the first ones, and those after the gradient's norm has grown by 2 to this power."""
NORMS = 5
"""Norms that must be known before one of them is a jump."""
NEAR = 0.8
"""From this share of the limit on, larger multipliers would be lowered again for the lag."""


def follow(memory: Memory, notes: Sequence[StepNote]) -> bool:
    """Follows the norm and the lag of a step; returns whether a phase has begun or ended with it.

    Args:
        memory: where everything is kept.
        notes: of all ranks.
    """
    before = memory.guard
    memory.guard = max(0, before - 1)
    memory.lag = max([note.lag for note in notes])
    norms = [note.norm for note in notes if math.isfinite(note.norm)]
    if norms:
        norm = median(norms)
        if memory.norms >= NORMS and norm > memory.norm + JUMP:
            memory.guard = GUARD
        memory.norm = norm if not memory.norms else 0.9 * memory.norm + 0.1 * norm
        memory.norms += 1
    return bool(before) != bool(memory.guard)


def strongest(memory: Memory, levels: Sequence[Level], lag_limit: float) -> int:
    """Returns the strongest level that may be asked for now."""
    largest, setting = math.inf, levels[memory.level]
    if memory.guard:
        largest = 1.0
    elif setting.sparsity > 1 and memory.lag >= NEAR * lag_limit:
        largest = setting.sparsity  # more would be lowered again, tensor by tensor
    return max(place for place, level in enumerate(levels) if level.sparsity <= largest)
