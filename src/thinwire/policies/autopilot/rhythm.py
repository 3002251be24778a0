"""How often the controller hears of steps and decides: the more seldom, the longer nothing has been odd.

Notes of compressed steps travel with them, and what they cost is the processor's time: a rank says nothing of a step
that was an ordinary one, but for the last few before a decision. Notes of uncompressed steps are messages of their own.
"""

from __future__ import annotations

import math

from thinwire.policies.autopilot.estimates import ENOUGH, WINDOW
from thinwire.policies.autopilot.memory import Memory

SETTLING = 2
"""Steps after a change that are not measured: kernels compile, buffers grow."""
PATIENCE = (2, 2, 8, 32, 128, 512)
"""Steps in a row for which another setting has been wanted for long enough, by the number of regrets."""
HURRY = 2
"""Patience for which every note is heard and decided with."""
MOST_RESTING = 16
"""Notes from one decision to the next, at most: twice as many with every decision for the setting in use."""
NOTE_S, NOTE_SHARE, UNHEARD_S, MOST_STEPS = 1e-3, 0.005, 0.25, 64
"""What a note takes where nothing else travels, and of the time; what a slower link is not heard of for that, in
seconds of usual steps, and in steps at most."""

ALARM_S = 2e-4
"""What a tiny all-reduce takes beside those of gradients; a note's share of the time is for it, too."""


def alarm_gap(usual_step_s: float) -> int:
    """Returns the steps from one tiny all-reduce to the next.

    >>> alarm_gap(0.008), alarm_gap(0.1)
    (5, 1)
    """
    return math.ceil(ALARM_S / (NOTE_SHARE * usual_step_s))


def restless(memory: Memory) -> bool:
    """Returns whether every note is worth a decision."""
    return bool(memory.guard) or (memory.calm > 0 and PATIENCE[memory.regrets] <= HURRY)


def unheard(memory: Memory) -> bool:
    """Returns whether nobody has to hear of an ordinary step that was compressed."""
    recent = memory.since <= SETTLING + WINDOW or memory.rest <= ENOUGH
    return not (recent or memory.asked or memory.doubts or restless(memory))


def rest(memory: Memory, usual_step_s: float, *, changed: bool) -> None:
    """Sets how many notes, and uncompressed steps, come until the next decision; after each of them.

    Args:
        memory: where everything is kept.
        usual_step_s: seconds of a step, as it was of late.
        changed: whether it has changed the setting.
    """
    if changed or restless(memory):
        memory.resting = memory.rest = memory.note_gap = 1
        return
    most = min(MOST_RESTING, PATIENCE[memory.regrets] // 4) if memory.calm else MOST_RESTING
    memory.resting = memory.rest = min(most, 2 * memory.resting)
    longest = _longest_gap(usual_step_s)
    memory.note_gap = max(1, memory.note_gap // 2) if memory.doubts else min(longest, 2 * memory.note_gap)


def _longest_gap(step_s: float) -> int:
    """Steps from one note to the next where nothing has changed for long."""
    return max(1, min(MOST_STEPS, max(math.ceil(NOTE_S / (NOTE_SHARE * step_s)), int(UNHEARD_S / step_s))))
