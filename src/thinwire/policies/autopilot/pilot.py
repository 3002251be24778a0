"""The controller of `codec="auto"`: which setting the next step has. Equal inputs give equal decisions on all ranks.

It wants the mildest setting whose step is at most 3 % longer than the best one's, and takes a stronger one where the
one in use is a twentieth longer. Where the link has become slower it takes that at once. All else has to be wanted
several times in a row, and every change that is soon taken back makes the next one take longer: a link that flaps is
treated as the slow one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal

from thinwire.errors import ConfigError
from thinwire.policies.autopilot.costs import Workload
from thinwire.policies.autopilot.levels import Level
from thinwire.policies.autopilot.memory import Memory
from thinwire.policies.autopilot.notes import StepNote
from thinwire.quantities import rate_text

Target = Literal["time", "bytes"]

GAIN, TOLERANCE = 1.05, 1.03
"""A stronger setting is taken where a step is so many times the best; the mildest within so many times it is wanted."""
CHANGED = 1.25
"""By this factor a link differs from what it was."""
WINDOW, SETTLING = 5, 2
"""Steps whose median counts, and steps after a change that are not measured: kernels compile, buffers grow."""
GUARD, JUMP = 20, 2.0
"""Steps in which s stays 1: the first ones, and those after the gradient's norm has grown by 2 to this power."""
PATIENCE = (2, 2, 8, 32, 128, 512)
"""Decisions in a row that another setting takes, by the number of regrets."""
REGRET, FORGET = 200, 1000
"""Notes within which a change back is a regret, and decisions in a row for no change that make one forgotten."""
STALE = 500
"""Notes after which nobody knows any longer what a setting takes that is not in use."""
UNMEASURED_S = 0.02
"""Seconds that a setting must save before any step has been measured."""
FEWEST, MOST = 64, 4096
"""Notes from one measurement of the link to the next."""
DOUBTS = 3
"""Steps in a row that are somewhat odd have the link measured, and two that are very odd, or compressed."""
LEAST_GAP, MOST_GAP = 4, 512
"""Notes until a doubt has the link measured again: four times as many with every doubt that was wrong."""
NEWS, FADING, MOST_DOUBTS = 2, 0.998, 24
"""Until then it takes messages that are so many times as late as with the last doubt that was wrong, whose time counts
so much less with every note; or so many times its steps in a row, at most 24: pauses end by themselves."""
UNEXPLAINED = 0.25
"""Of a step: latency above this has the link measured now and then while steps are uncompressed."""
SHARE = 0.005
"""Of the time that goes into measuring the link, and into notes where nothing else travels."""
NOTE_S, PROBE_S, PROBE_BITS = 1e-3, 0.1, 8 * 65536
MOST_STEPS = 8
"""At most so many uncompressed steps from one note to the next."""
NEAR = 0.8
"""From this share of the limit on, larger multipliers would be lowered again for the lag."""
FASTEST_BPS = 1e14


class Pilot:
    """Decides from notes and from measurements of the link.

    Args:
        levels: the settings, from the mildest; `levels()` makes them.
        work: what is exchanged in a step.
        lag_limit: the most steps that may wait in a residual.
        target: what is to be least: seconds of a step, or bytes.

    Raises:
        ConfigError: another target.

    Attributes:
        memory: all that later decisions depend on.

    Example:
        >>> from thinwire.policies.autopilot.levels import levels
        >>> work = Workload(coded=10**6, plain=0, ranks=4, groups=1, uncompressed_nbytes=4 * 10**6)
        >>> pilot = Pilot(levels(), work)
        >>> pilot.take_link(1e7)
        >>> pilot.setting.name
        '3lc[s=1,zstd]'
    """

    def __init__(
        self, levels: Sequence[Level], work: Workload, *, lag_limit: float = 5.0, target: Target = "time"
    ) -> None:
        if target not in ("time", "bytes"):
            raise ConfigError(f"target={target!r}; allowed are 'time' and 'bytes'")
        self.levels = levels
        self.work = work
        self._expected_bits = {level.name: level.bits for level in levels}
        self._expected_s = {level.name: work.codec_s(level) for level in levels}
        self.lag_limit = lag_limit
        self.target = target
        self.memory = Memory(guard=GUARD, probe_in=FEWEST, alarm_gap=LEAST_GAP)
        self._news: list[str] = []
        if target == "bytes":
            self._decide()

    @property
    def setting(self) -> Level:
        """The setting of the step to come."""
        return self.levels[self.memory.level]

    @property
    def wants_probe(self) -> bool:
        """Whether the link is to be measured before the step to come."""
        return self.memory.probe

    @property
    def note_every(self) -> int:
        """Steps from one note to the next where messages would travel for the notes alone."""
        memory = self.memory
        if memory.notes < GUARD or memory.doubts:
            return 1
        return max(1, min(MOST_STEPS, math.ceil(NOTE_S / (SHARE * self._usual_step_s()))))

    def news(self) -> list[str]:
        """Returns what is to be logged, once."""
        news, self._news = self._news, []
        return news

    def take_link(self, bps: float) -> None:
        """Takes a measurement of the slowest link, in bits per second, and decides anew."""
        memory = self.memory
        memory.probe, memory.probe_in = False, self._probe_period()
        if not self._usable(bps):
            return
        known = memory.link_bps
        changed = self.surprising(bps)
        memory.alarm_gap = LEAST_GAP if changed else min(MOST_GAP, 4 * memory.alarm_gap)
        memory.alarm_in = memory.alarm_gap
        # What the doubt was about and the link does not explain is something else: only what lasts longer is news.
        memory.denied_s = 0.0 if changed else max(memory.denied_s, memory.doubted_s)
        memory.denied = 0 if changed else max(memory.denied // 2, memory.doubts)
        if not changed and memory.doubts >= DOUBTS:
            memory.latency_s[memory.doubted] = max(memory.latency_s.get(memory.doubted, 0.0), memory.doubted_s)
        memory.doubted_s, memory.doubts = 0.0, 0
        memory.link_bps = bps if changed else known * (bps / known) ** 0.5
        if changed:
            memory.moved = True
            memory.exposed_s, memory.latency_s = [], {}
            memory.excess_s.pop(self.levels[0].name, None)
            memory.measured_at.pop(self.levels[0].name, None)
            memory.codec_s.pop(self.levels[0].name, None)
        self._decide()

    def surprising(self, bps: float) -> bool:
        """Returns whether a measurement of the link says that it is another than what is known."""
        known = self.memory.link_bps
        return not known or not 1 / CHANGED < bps / known < CHANGED

    def take(self, notes: Sequence[StepNote], level: int) -> None:
        """Takes all ranks' notes of one step, in rank order, and decides anew.

        Args:
            notes: equal on all ranks.
            level: index of the setting that the step had.
        """
        memory = self.memory
        memory.notes += 1
        good = []
        for rank, note in enumerate(notes):
            if problem := note.problem:
                self._complain("clock", f"rank {rank} measured {problem}, which cannot be: it is left out")
            else:
                good.append(note)
        if not good:
            return
        self._guard(good)
        exposed = min(note.exposed_s for note in good)  # of the last to be ready: it waits for nobody's computation
        step = median(note.step_s for note in good)
        memory.step_s = [*memory.step_s, step][-WINDOW:]
        memory.since += level == memory.level
        memory.alarm_in -= 1
        unseen = not min(note.link_s for note in good)
        if unseen or self.levels[level].codec is not None:  # uncompressed steps show what the link does all the time
            memory.probe_in -= 1
            memory.probe |= memory.probe_in <= 0
        elif memory.latency_s.get(_kind(self.levels[level]), 0.0) > UNEXPLAINED * self._usual_step_s():
            memory.probe_in -= 1  # what looks like a slow link is not quite believed to be none
            memory.probe |= memory.probe_in <= 0
        if unseen:  # all-reduces on a GPU: the host does not know when they end
            self._decide()
            return
        memory.compute_s = [*memory.compute_s, max(0.0, step - exposed)][-WINDOW:]
        memory.overlap_s = [*memory.overlap_s, median(note.overlap_s for note in good)][-WINDOW:]
        settled = level == memory.level and memory.since > SETTLING
        if self._follow_link(good, level) and settled:
            self._measure(good, level, exposed)
        self._decide()

    def step_s(self, index: int) -> float:
        """Returns the seconds that a step is expected to take at a level. The link must be known."""
        return self._compute_s() + max(0.0, self._exchange_s(index) + self._excess_s(index))

    def state(self) -> str:
        """Returns the memory as text, for an exact resume."""
        return self.memory.state()

    def load_state(self, text: str) -> None:
        """Takes the memory back. Raises ConfigError where it cannot be that."""
        memory = Memory.from_state(text)
        if not 0 <= memory.level < len(self.levels):
            raise ConfigError(
                f"the state of codec='auto' has setting {memory.level} of {len(self.levels)}; load it with the "
                "lag_limit it was saved with"
            )
        self.memory = memory

    # ---- what notes say

    def _guard(self, notes: Sequence[StepNote]) -> None:
        memory = self.memory
        memory.guard = max(0, memory.guard - 1)
        memory.lag = max(note.lag for note in notes)
        norms = [note.norm for note in notes if math.isfinite(note.norm)]
        if norms:
            norm = median(norms)
            if memory.norms >= WINDOW and norm > memory.norm + JUMP:
                memory.guard = GUARD
            memory.norm = norm if not memory.norms else 0.9 * memory.norm + 0.1 * norm
            memory.norms += 1

    def _follow_link(self, notes: Sequence[StepNote], level: int) -> bool:
        """Compares a step's messages with the link that is known; a doubt has it measured. Returns whether to learn."""
        memory, at = self.memory, self.levels[level]
        compressed, link_s = at.codec is not None, min(note.link_s for note in notes)
        sent = max(note.sent_nbytes for note in notes) if compressed else self.work.nbytes(at, at.bits)
        if compressed and sent:
            memory.bits[at.name] = _mean(memory.bits.get(at.name), self.work.bits(sent), 0.3)
        if not memory.link_bps:
            memory.probe = True
            return False
        bytes_s, kind = 8 * sent / memory.link_bps, _kind(at)
        expected = bytes_s + memory.latency_s.get(kind, 0.0)
        slower = link_s > 1.5 * expected + 3e-3
        # A rank that is late itself finds that everything has come already: one that waits little says little.
        faster = bytes_s > 3e-3 and median(note.link_s for note in notes) < 0.6 * bytes_s
        doubt = (slower or faster) and memory.since > 1
        memory.denied_s *= FADING
        # Busy processors make a link look slower, never faster; and backward passes compete with all-reduces for them.
        weight = DOUBTS if compressed and faster else 2 if compressed or link_s > 4 * expected + 1e-2 else 1
        if doubt:
            beyond_s = max(0.0, link_s - bytes_s)
            memory.doubted_s = min(memory.doubted_s, beyond_s) if memory.doubts else beyond_s
            memory.doubted, memory.doubts = kind, memory.doubts + weight
            enough = DOUBTS if memory.alarm_in <= 0 else max(DOUBTS, min(MOST_DOUBTS, NEWS * memory.denied))
            later = memory.doubts >= DOUBTS and beyond_s > NEWS * memory.denied_s
            memory.probe |= later or memory.doubts >= enough
            return False
        memory.doubts = 0
        # What a measurement has not explained is latency.
        memory.latency_s[kind] = _mean(memory.latency_s.get(kind), max(0.0, link_s - bytes_s), 0.1)
        return True

    def _measure(self, notes: Sequence[StepNote], level: int, exposed: float) -> None:
        """Takes what a step at the setting in use has cost beyond what the model says."""
        memory, name = self.memory, self.levels[level].name
        for other, at in list(memory.measured_at.items()):
            if memory.notes - at > STALE:
                del memory.measured_at[other], memory.excess_s[other], memory.codec_s[other]
        memory.exposed_s = [*memory.exposed_s, exposed][-WINDOW:]
        memory.encoded_s = [*memory.encoded_s, median(note.codec_s for note in notes)][-WINDOW:]
        if len(memory.exposed_s) >= 3:
            memory.codec_s[name] = median(memory.encoded_s)
            memory.excess_s[name] = median(memory.exposed_s) - self._exchange_s(level)
            memory.measured_at[name] = memory.notes

    # ---- the model

    def _compute_s(self) -> float:
        return median(self.memory.compute_s) if self.memory.compute_s else 0.0

    def _exchange_s(self, index: int) -> float:
        """What of an exchange the training loop waits for, as the model has it."""
        memory, level = self.memory, self.levels[index]
        link_s = 8 * self.work.nbytes(level, self._bits(level)) / memory.link_bps
        hidden = self.work.hidden(level, median(memory.overlap_s) if memory.overlap_s else 0.0)
        return self._codec_s(level) + max(0.0, link_s - hidden)

    def _bits(self, level: Level) -> float:
        return self._known(level, self.memory.bits, self._expected_bits, alone=True)

    def _codec_s(self, level: Level) -> float:
        return self._known(level, self.memory.codec_s, self._expected_s)

    def _known(
        self, level: Level, measured: dict[str, float], expected: dict[str, float], *, alone: bool = False
    ) -> float:
        """Measured; or expected, times what the nearest measured level differs from expectation.

        That is one of the same codec, or unless it counts `alone`, of another: much of what a codec takes on a busy
        machine is not its own.
        """
        name = level.name
        if name in measured or level.codec is None:
            return measured.get(name, expected[name])
        index = self.levels.index(level)
        alike = [
            (other.codec.id != level.codec.id, abs(index - place), measured[other.name] / expected[other.name])
            for place, other in enumerate(self.levels)
            if other.name in measured and other.codec is not None and not (alone and other.codec.id != level.codec.id)
        ]
        return expected[name] * max(0.1, min(10.0, min(alike)[-1])) if alike else expected[name]

    def _excess_s(self, index: int) -> float:
        """Measured, or that of the nearest level in use so far: what delays one exchange delays the others too."""
        excess, level = self.memory.excess_s, self.levels[index]
        if level.name in excess or level.codec is None:
            return excess.get(level.name, 0.0)
        known = [
            (other.codec is None, abs(index - place), excess[other.name])
            for place, other in enumerate(self.levels)
            if other.name in excess
        ]
        return max(0.0, min(known)[-1]) if known else 0.0

    def _usual_step_s(self) -> float:
        return max(1e-3, median(self.memory.step_s)) if self.memory.step_s else 1.0

    def _probe_period(self) -> int:
        cost = PROBE_S + PROBE_BITS / self.memory.link_bps if self.memory.link_bps else PROBE_S
        return max(FEWEST, min(MOST, math.ceil(cost / (SHARE * self._usual_step_s()))))

    # ---- the decision

    def _decide(self) -> None:
        memory, levels = self.memory, self.levels
        most = max(index for index, level in enumerate(levels) if level.sparsity <= self._largest_sparsity())
        if self.target == "bytes":
            self._change(most, "the fewest bytes that the lag allows")
            return
        if not memory.link_bps:
            return
        expected = [self.step_s(index) for index in range(most + 1)]
        wanted = next(i for i, seconds in enumerate(expected) if seconds <= TOLERANCE * min(expected))
        if memory.level > most:
            self._change(wanted, "steps are critical")
            return
        memory.content = memory.content + 1 if wanted == memory.level else 0
        if memory.content >= FORGET:
            memory.content, memory.regrets = 0, max(0, memory.regrets - 1)
        if wanted == memory.level:
            memory.calm = 0
            return
        now = expected[memory.level]
        stronger = wanted > memory.level
        least_s = UNMEASURED_S if not memory.compute_s else 0.0
        if stronger and (now < GAIN * min(expected) or now - expected[wanted] < least_s):
            memory.calm = 0
            return
        memory.calm += 1
        at_once = stronger and memory.moved
        if at_once or (memory.since >= SETTLING and memory.calm >= PATIENCE[memory.regrets]):
            if memory.turned_at and memory.milder == stronger and memory.notes - memory.turned_at < REGRET:
                memory.regrets = min(len(PATIENCE) - 1, memory.regrets + 1)
            memory.turned_at, memory.milder = memory.notes, not stronger
            link = rate_text(memory.link_bps)
            self._change(wanted, f"link {link}, {1e3 * expected[wanted]:.3g} ms a step in place of {1e3 * now:.3g}")

    def _largest_sparsity(self) -> float:
        """The largest multiplier that may be asked for now."""
        if self.memory.guard:
            return 1.0
        if self.setting.sparsity > 1 and self.memory.lag >= NEAR * self.lag_limit:
            return self.setting.sparsity  # more would be lowered again, tensor by tensor
        return math.inf

    def _change(self, index: int, why: str) -> None:
        memory = self.memory
        if index == memory.level:
            return
        self._news.append(f"{self.setting.name} → {self.levels[index].name}: {why}")
        memory.level = index
        memory.changes += 1
        memory.since = memory.calm = 0
        memory.exposed_s, memory.encoded_s = [], []
        memory.moved = False
        memory.probe = False
        memory.probe_in = max(memory.probe_in, FEWEST)

    def _usable(self, bps: float) -> bool:
        if math.isfinite(bps) and 0 < bps <= FASTEST_BPS:
            return True
        self._complain("link", f"a link of {bps:g} bit/s was measured, which cannot be: it is left out")
        return False

    def _complain(self, kind: str, text: str) -> None:
        """Says it once."""
        if kind not in self.memory.said:
            self.memory.said.append(kind)
            self._news.append(text)


def _kind(level: Level) -> str:
    return "all-reduced" if level.codec is None else "compressed"


def _mean(before: float | None, now: float, weight: float) -> float:
    return now if before is None else (1 - weight) * before + weight * now
