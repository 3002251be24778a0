"""Whether the link is still what it was: every step's messages are compared with it, and a doubt has it measured.

Measurements for doubts take a small share of the time, and most of it is kept for doubts whose answer could change the
setting. Where a step's messages are long enough to tell the rate by themselves, nothing else has to be sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from thinwire.policies.autopilot.costs import Workload
from thinwire.policies.autopilot.levels import Level
from thinwire.policies.autopilot.memory import Memory
from thinwire.policies.autopilot.notes import StepNote
from thinwire.policies.autopilot.probing import DOUBTED_SHARE, MOST_CREDIT, cost_s

CHANGED = 1.25
"""By this factor a link differs from what it was."""
DOUBTS = 3
"""Steps in a row that are somewhat odd make a doubt, and two that are very odd, or compressed."""
LEAST_GAP, MOST_GAP = 4, 512
"""Notes until a doubt has the link measured again: four times as many with every doubt that was wrong."""
NEWS, FADING, MOST_DOUBTS = 2, 0.998, 24
"""Until then it takes messages that are so many times as late as with the last doubt that was wrong, whose time counts
so much less with every note; or so many times its steps in a row, at most 24: pauses end by themselves."""
CLEAR_S = 0.1
"""Messages that take so long, and four times what they were expected to, tell the rate of a link by themselves."""
IDLE_CREDIT = MOST_CREDIT - 1
"""Measurements that must be left for one that does not matter now."""
GLARING_S, GLARING = 0.15, 8
"""Those of a single step are enough where they take so long, and so many times what they were expected to."""
FRESH = 4
"""A step whose messages tell of a rate so many times below the best of those in doubt begins a doubt of its own."""
RECENT, TELLING = 3, 2
"""Of the waits of so many unmeasured steps, the one that so many were no shorter than tells of the link."""
LATE, EARLY = 1.5, 0.6
"""Messages are late that take so many times what is expected of them, and early below so much of what bytes take."""
ODD_S, VERY_ODD = 3e-3, (4, 1e-2)
"""Messages within so much of what is expected are not odd; very odd are those so many times as late, and so much."""


class LinkDoubts:
    """Compares messages with the link that is known.

    Args:
        work: what is exchanged in a step.
        memory: where everything is kept.
        matters: whether another setting would be wanted on a link of so many bits per second.
    """

    def __init__(self, work: Workload, memory: Memory, matters: Callable[[float], bool]) -> None:
        self._work, self._memory, self._matters = work, memory, matters

    def surprising(self, bps: float) -> bool:
        """Returns whether a measurement of the link says that it is another than what is known."""
        known = self._memory.link_bps
        return not known or not 1 / CHANGED < bps / known < CHANGED

    def believes(self, bps: float) -> bool:
        """Returns whether a measurement needs no second one: it is no slower than known, or than messages have been."""
        memory = self._memory
        heard = 0 < bps < CHANGED * memory.doubted_bps
        return bps > memory.link_bps or heard or not self.surprising(bps)

    def follow(self, notes: Sequence[StepNote], level: Level) -> tuple[bool, float]:
        """Compares a step's messages with the link that is known; a doubt may have it measured.

        Returns:
            Whether the step was as expected, and what the link is if its messages say that by themselves, else 0.
        """
        memory, compressed = self._memory, level.codec is not None
        waits_s = [note.link_s for note in notes]
        link_s = min(waits_s)
        # Where no rank says that it sent anything, it is what is expected: a step of nothing takes no time to compare.
        told = max([note.sent_nbytes for note in notes]) if compressed else 0.0
        sent = told or self._work.nbytes(level, level.bits)
        if not memory.link_bps:
            memory.probe = True
            return False, 0.0
        kind = kind_of(level)
        bytes_s, latency_s = self._expected_s(level, sent)
        expected = bytes_s + latency_s
        slower = link_s > LATE * expected + ODD_S
        # A rank that is late itself finds that everything has come already: one that waits little says little.
        faster = bytes_s > ODD_S and median(waits_s) < EARLY * bytes_s
        memory.denied_s *= FADING
        if (slower or faster) and memory.since > 1:
            very = _very_late(link_s, expected)
            # Busy processors make a link look slower, never faster; and backward passes compete with all-reduces.
            glaring = slower and self._glaring(link_s, expected)
            weight = DOUBTS if glaring or (compressed and faster) else 2 if compressed or very else 1
            heard_bps = 8 * sent / max(1e-4, link_s if slower else median(waits_s))
            if self._doubt(kind, weight, max(0.0, link_s - bytes_s), heard_bps):
                clear = slower and very and link_s > CLEAR_S and memory.doubted_bps < memory.link_bps / CHANGED
                return False, self._follow_up(clear)
            if memory.doubts:
                return False, 0.0
        memory.doubts, memory.doubted_bps = 0, 0.0
        # What a measurement has not explained is latency.
        late_s = max(0.0, link_s - bytes_s)
        memory.latency_s[kind] = 0.9 * latency_s + 0.1 * late_s if kind in memory.latency_s else late_s
        return True, 0.0

    def follow_unseen(self, step_s: float, usual_s: float, level: Level) -> None:
        """Compares a step in which nobody saw messages, as on a GPU, with usual ones; a doubt may have it measured.

        Args:
            step_s: of the step.
            usual_s: of those before it.
            level: that the step had.
        """
        memory = self._memory
        memory.denied_s *= FADING
        if memory.link_bps and memory.since > 1 and step_s > LATE * usual_s + ODD_S:
            weight = DOUBTS if self._glaring(step_s, usual_s) else 2 if _very_late(step_s, usual_s) else 1
            beyond_s = step_s - usual_s
            if self._doubt(kind_of(level), weight, beyond_s, 8 * self._work.nbytes(level, level.bits) / beyond_s):
                self._follow_up(clear=False)
            return
        memory.doubts, memory.doubted_bps = 0, 0.0

    def telling_s(self, waits_s: Sequence[float], level: Level) -> float:
        """Returns what of a rank's last waits in uncompressed steps is worth telling: one late step alone says little.

        Args:
            waits_s: for averages, of the last `RECENT` steps or fewer.
            level: that these steps had.
        """
        if waits_s and self._glaring(waits_s[-1], sum(self._expected_s(level, self._work.nbytes(level, level.bits)))):
            return waits_s[-1]
        return sorted(waits_s)[-TELLING] if len(waits_s) >= TELLING else 0.0

    def take_wait(self, wait_s: float, level: Level) -> float:
        """Takes the least of what all ranks told of such steps; a doubt may have the link measured.

        Returns:
            What the link is if these messages say that by themselves, else 0.
        """
        memory, sent = self._memory, self._work.nbytes(level, level.bits)
        bytes_s, latency_s = self._expected_s(level, sent)
        if not memory.link_bps or memory.since <= 1 or not _very_late(wait_s, bytes_s + latency_s):
            return 0.0
        heard_bps = 8 * sent / wait_s
        if not self._doubt(kind_of(level), DOUBTS, max(0.0, wait_s - bytes_s), heard_bps):
            return 0.0
        return self._follow_up(wait_s > CLEAR_S and memory.doubted_bps < memory.link_bps / CHANGED)

    def odd(self, link_s: float, level: Level, bits: float) -> bool:
        """Returns whether a rank's own messages of a compressed step took longer or shorter than is expected.

        Where all ranks' did, `follow` has its doubts; where one's did not, the step is an ordinary one.

        Args:
            link_s: of waiting for messages.
            level: that the step had.
            bits: of a value.
        """
        bytes_s, latency_s = self._expected_s(level, self._work.nbytes(level, bits))
        return link_s > LATE * (bytes_s + latency_s) + ODD_S or (bytes_s > ODD_S and link_s < EARLY * bytes_s)

    def take_link(self, bps: float, tries: int) -> bool:
        """Takes a measurement of the link, made so many times; returns whether it is another link than was known."""
        memory, known = self._memory, self._memory.link_bps
        changed = self.surprising(bps)
        memory.credit -= tries if memory.doubts else 0
        memory.alarm_gap = LEAST_GAP if changed else min(MOST_GAP, 4 * memory.alarm_gap)
        memory.alarm_in = memory.alarm_gap
        # What the doubt was about and the link does not explain is something else: only what lasts longer is news.
        memory.denied_s = 0.0 if changed else max(memory.denied_s, memory.doubted_s)
        memory.denied = 0 if changed else max(memory.denied // 2, memory.doubts)
        if not changed and memory.doubts >= DOUBTS:
            memory.latency_s[memory.doubted] = max(memory.latency_s.get(memory.doubted, 0.0), memory.doubted_s)
        memory.doubted_s, memory.doubts, memory.doubted_bps = 0.0, 0, 0.0
        memory.link_bps = bps if changed else known * (bps / known) ** 0.5
        return changed

    def earn(self, seconds: float) -> None:
        """Takes the seconds that have been trained for: a share of them may go into measuring the link for doubts."""
        memory = self._memory
        if memory.credit >= MOST_CREDIT:
            return
        earned = DOUBTED_SHARE * seconds / cost_s(memory.doubted_bps or memory.link_bps)
        memory.credit = min(float(MOST_CREDIT), memory.credit + earned)

    def _expected_s(self, level: Level, nbytes: float) -> tuple[float, float]:
        """Seconds that bytes take on the link that is known, and what messages took beyond that."""
        memory = self._memory
        bytes_s = 8 * nbytes / memory.link_bps if memory.link_bps else math.inf
        return bytes_s, memory.latency_s.get(kind_of(level), 0.0)

    @staticmethod
    def _glaring(link_s: float, expected: float) -> bool:
        return link_s > GLARING_S and link_s > GLARING * expected

    def _doubt(self, kind: str, weight: int, beyond_s: float, heard_bps: float) -> bool:
        """Counts a step whose messages were odd; returns whether it is time to do something about them."""
        memory = self._memory
        if heard_bps < memory.doubted_bps / FRESH:
            memory.doubts = 0  # what the steps before were late by is nothing beside this
        memory.doubted_s = min(memory.doubted_s, beyond_s) if memory.doubts else beyond_s
        memory.doubted_bps = max(memory.doubted_bps, heard_bps) if memory.doubts else heard_bps
        memory.doubted, memory.doubts = kind, memory.doubts + weight
        enough = DOUBTS if memory.alarm_in <= 0 else max(DOUBTS, min(MOST_DOUBTS, NEWS * memory.denied))
        later = memory.doubts >= DOUBTS and beyond_s > NEWS * memory.denied_s
        if not (later or memory.doubts >= enough):
            return False
        if memory.credit < IDLE_CREDIT and not self._matters(memory.doubted_bps):
            memory.doubts = 0  # whatever the link is, the setting stays: it is taken as it comes
            return False
        return True

    def _follow_up(self, clear: bool) -> float:
        """Has the link measured where there is time for that; or returns its rate, where messages are clear."""
        memory = self._memory
        if clear:
            return memory.doubted_bps
        memory.probe |= memory.credit >= 1
        return 0.0


def _very_late(link_s: float, expected: float) -> bool:
    times, beyond = VERY_ODD
    return link_s > times * expected + beyond


def kind_of(level: Level) -> str:
    """Returns the kind of a level's messages, whose latency is of that kind."""
    return "all-reduced" if level.codec is None else "compressed"


def usable(bps: float) -> bool:
    """Returns whether a link can have this rate."""
    return math.isfinite(bps) and 0 < bps <= 1e14
