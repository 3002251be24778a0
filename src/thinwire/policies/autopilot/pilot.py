"""The controller of `codec="auto"`: which setting the next step has. Equal inputs give equal decisions on all ranks.

It wants the mildest setting that costs at most 3 % more than the best one, and takes a stronger one where the one in
use costs a twentieth more. A setting costs the seconds of its step, times how many steps a training takes with it.
Where the link has become slower it takes that at once. All else has to be wanted several times in a row, and every
change that is soon taken back makes the next one take longer: a link that flaps is treated as the slow one. While
nothing is odd it decides less and less often.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median
from typing import Literal

from thinwire.errors import ConfigError
from thinwire.policies.autopilot.costs import Workload
from thinwire.policies.autopilot.critical import GUARD, JUMP, follow, strongest
from thinwire.policies.autopilot.doubts import FADING, LEAST_GAP, LinkDoubts, kind_of, usable
from thinwire.policies.autopilot.estimates import ENOUGH, WINDOW, Estimates, wanted
from thinwire.policies.autopilot.levels import Level
from thinwire.policies.autopilot.memory import Memory
from thinwire.policies.autopilot.notes import StepNote
from thinwire.policies.autopilot.probing import FEWEST, MOST_CREDIT, PROBE_ENOUGH_S, period
from thinwire.policies.autopilot.rhythm import PATIENCE, SETTLING, alarm_gap, rest, restless, unheard
from thinwire.quantities import counted, rate_text

Target = Literal["time", "bytes"]

GAIN = 1.05
"""A stronger setting is taken where the one in use costs so many times the best."""
REGRET, FORGET = 500, 1000
"""Notes within which a change back is a regret, and notes in a row without a change that make one forgotten."""
UNMEASURED_S = 0.02
"""Seconds that a setting must save before any step has been measured."""
UNEXPLAINED = 0.25
"""Of a step: latency above this has the link measured now and then while steps are uncompressed."""


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
        self.levels, self.work = levels, work
        self.lag_limit, self.target = lag_limit, target
        self._news: list[str] = []
        self._remember(Memory(guard=GUARD, probe_in=FEWEST, alarm_gap=LEAST_GAP, credit=float(MOST_CREDIT)))
        if target == "bytes":
            self._decide()

    def _remember(self, memory: Memory) -> None:
        self.memory = memory
        self._estimates = Estimates(self.levels, self.work, memory)
        self._doubts = LinkDoubts(self.work, memory, self._matters)

    @property
    def setting(self) -> Level:
        """The setting of the step to come."""
        return self.levels[self.memory.level]

    @property
    def wants_probe(self) -> bool:
        """Whether the link is to be measured before the step to come."""
        return self.memory.probe

    @property
    def probe_nbytes(self) -> int:
        """Bytes of the smallest message that the link is worth measuring with, as far as its rate is known."""
        memory = self.memory
        bps = min(memory.link_bps, memory.doubted_bps or math.inf)
        return int(bps / 8 * PROBE_ENOUGH_S / 4)

    @property
    def note_every(self) -> int:
        """Steps from one note to the next where messages would travel for the notes alone."""
        return 1 if self.memory.doubts else self.memory.note_gap

    def news(self) -> list[str]:
        """Returns what is to be logged, once."""
        news, self._news = self._news, []
        return news

    def take_link(self, bps: float, tries: int = 1) -> None:
        """Takes a measurement of the slowest link, in bits per second, made so many times, and decides anew."""
        memory = self.memory
        memory.probe, memory.probe_in = False, period(memory.link_bps, self._estimates.usual_step_s)
        if not usable(bps):
            self._complain("link", f"a link of {bps:g} bit/s was measured, which cannot be: it is left out")
            return
        self._estimates.settle()
        if self._doubts.take_link(bps, tries):
            memory.moved, memory.note_gap = True, 1
            self._estimates.forget_exchanges()
        self._decide()

    def surprising(self, bps: float) -> bool:
        """Returns whether a measurement of the link says that it is another than what is known."""
        return self._doubts.surprising(bps)

    def believes(self, bps: float) -> bool:
        """Returns whether a measurement of the link needs no second one."""
        return self._doubts.believes(bps)

    def take(self, notes: Sequence[StepNote], level: int) -> None:
        """Takes all ranks' notes of one step, in rank order, and decides anew where that may change something.

        Args:
            notes: equal on all ranks.
            level: index of the setting that the step had.
        """
        memory, at = self.memory, self.levels[level]
        steps = 1 if at.codec is not None else self.note_every  # since the note before
        memory.notes += 1
        memory.asked = False
        good = self._good(notes)
        if not good:
            return
        begun = follow(memory, good)
        exposed_s = min([note.exposed_s for note in good])  # of the last to be ready: it waits for no computation
        step_s = median([note.step_s for note in good])
        link_s = min([note.link_s for note in good])
        usual_s = self._estimates.usual_step_s if len(memory.step_s) >= ENOUGH else math.inf
        self._estimates.take_step(step_s)
        self._doubts.earn(step_s * steps)
        memory.since += level == memory.level
        memory.alarm_in -= 1
        unseen = not link_s and at.codec is None
        self._count_down(at, link_s, steps if unseen else 1)
        if unseen:
            self._doubts.follow_unseen(step_s, usual_s, at)
        if link_s:
            if at.codec is not None and (sent := max([note.sent_nbytes for note in good])):
                self._estimates.take_sent(at, sent)
            self._estimates.take_computation(step_s, exposed_s, good)
            calm, bps = self._doubts.follow(good, at)
            if calm and level == memory.level and memory.since > SETTLING:
                self._estimates.take_exchange(exposed_s, good)
            if bps:
                self.take_link(bps, 0)
                memory.probe_in = FEWEST  # what messages have said is soon to be measured
                return
        memory.rest -= 1
        # Notes of uncompressed steps are rare, but for those of doubts, which the next steps are to settle.
        rare = at.codec is None and not memory.doubts
        if rare or begun or memory.rest <= 0 or restless(memory) or memory.since <= SETTLING + WINDOW:
            self._decide()
        elif memory.doubts:
            memory.note_gap = max(1, memory.note_gap // 2)

    @property
    def alarm_every(self) -> int:
        """Unmeasured steps from one number that tells of the link to the next."""
        return min(self.memory.note_gap, alarm_gap(self._estimates.usual_step_s))

    def telling_s(self, waits_s: Sequence[float]) -> float:
        """Returns what of a rank's waits for averages, in its last unmeasured steps, the others are to hear."""
        return self._doubts.telling_s(waits_s, self.setting)

    def take_wait(self, wait_s: float) -> None:
        """Takes the least of what all ranks told so; it may change the setting at once, or have the link measured."""
        if bps := self._doubts.take_wait(wait_s, self.setting):
            self.take_link(bps, 0)
            self.memory.probe_in = FEWEST

    def ordinary(self, link_s: float, norm: float) -> bool:
        """Returns whether nobody has to hear of a rank's compressed step; for `link_s` and `norm` see `StepNote`."""
        memory, setting = self.memory, self.setting
        if not unheard(memory) or norm > memory.norm + JUMP:
            return False
        return not self._doubts.odd(link_s, setting, memory.bits.get(setting.name, setting.bits))

    def pass_by(self, level: int, *, asked: bool) -> None:
        """Takes a compressed step that a rank has found ordinary; where few did (`asked`), all tell of the next one."""
        memory = self.memory
        memory.notes += 1
        memory.since += level == memory.level
        memory.alarm_in -= 1
        memory.rest -= 1
        memory.denied_s *= FADING
        memory.asked = asked
        self._doubts.earn(self._estimates.usual_step_s)
        self._count_down(self.levels[level], 0.0, 1)

    def describe(self, level: int, since: int, unit: Literal["step", "exchange"]) -> str:
        """Returns in words which setting is in use, since which step or exchange, and what the link is known to be."""
        memory = self.memory
        link = f"link {rate_text(memory.link_bps)}" if memory.link_bps else "link not measured yet"
        return f"{self.levels[level].name} since {unit} {since}, {counted(memory.changes, 'change')}, {link}"

    def step_s(self, index: int) -> float:
        """Returns the seconds that a step is expected to take at a level. The link must be known."""
        return self._estimates.steps_s(index, self.memory.link_bps)[index]

    def state(self) -> str:
        """Returns the memory as text, for an exact resume."""
        return self.memory.state()

    def load_state(self, text: str) -> None:
        """Takes the memory back, as `load` does. Raises ConfigError where it cannot be that; nothing has changed."""
        self.load(Memory.from_state(text))

    def load(self, memory: Memory) -> None:
        """Takes a memory back. Of a setting that is not among the levels here the strongest takes the place."""
        memory.level = min(memory.level, len(self.levels) - 1)
        self._remember(memory)

    def leave_out(self, names: Collection[str]) -> None:
        """Chooses no more among these settings, some of them and the same on all ranks.

        In place of one that is in use the next stronger one is taken, or the strongest.
        """
        kept = [place for place, level in enumerate(self.levels) if level.name not in names]
        self._estimates.settle()
        self._change(next((p for p in kept if p >= self.memory.level), kept[-1]), "a worker has no kernels for it")
        setting = self.setting
        self.levels = [self.levels[place] for place in kept]
        self.memory.level = self.levels.index(setting)
        self._remember(self.memory)

    # ---- what notes say

    def _good(self, notes: Sequence[StepNote]) -> list[StepNote]:
        good = []
        for rank, note in enumerate(notes):
            if problem := note.problem:
                self._complain("clock", f"rank {rank} measured {problem}, which cannot be: it is left out")
            else:
                good.append(note)
        return good

    def _count_down(self, at: Level, link_s: float, steps: int) -> None:
        """Has the link measured every so often where steps do not show it, or show what is not quite believed."""
        memory = self.memory
        if at.codec is None and link_s:  # uncompressed steps show what the link does all the time
            latency_s = memory.latency_s.get(kind_of(at), 0.0)
            if latency_s <= UNEXPLAINED * self._estimates.usual_step_s:
                return
        memory.probe_in -= steps
        memory.probe |= memory.probe_in <= 0

    # ---- the decision

    def _matters(self, bps: float) -> bool:
        """Returns whether another setting would be wanted on a link of this rate."""
        memory, most = self.memory, strongest(self.memory, self.levels, self.lag_limit)
        if memory.level > most:
            return True
        costs_s = self._weighed(self._estimates.steps_s(most, bps))
        return wanted(costs_s) < memory.level or costs_s[memory.level] >= GAIN * min(costs_s)

    def _weighed(self, expected: list[float]) -> list[float]:
        """Returns what steps of these seconds cost, at the levels up to the strongest that may be asked for."""
        return [level.cost_s(step_s) for level, step_s in zip(self.levels, expected, strict=False)]

    def _decide(self) -> None:
        """Decides anew, and how long to leave it at that."""
        memory, level = self.memory, self.memory.level
        gap = self.note_every if self.setting.codec is None else 1  # as many steps as an uncompressed note stands for
        since, memory.rest = gap * (memory.resting - memory.rest), 0
        most = strongest(memory, self.levels, self.lag_limit)
        if self.target == "bytes":
            self._change(most, "the fewest bytes that the lag allows")
        elif memory.link_bps:
            self._estimates.settle()
            self._choose(self._estimates.steps_s(most, memory.link_bps), most, since)
        rest(memory, self._estimates.usual_step_s, changed=memory.level != level)

    def _choose(self, expected: list[float], most: int, notes: int) -> None:
        """Changes the setting if another has been wanted for long enough; `notes` have come since the last decision."""
        memory, costs_s = self.memory, self._weighed(expected)
        best, place = max(min(costs_s), 1e-9), wanted(costs_s)  # medians may come to nothing
        if memory.level > most:
            self._change(place, "steps are critical")
            return
        memory.content = memory.content + notes if place == memory.level else 0
        if memory.content >= FORGET:
            memory.content, memory.regrets = 0, max(0, memory.regrets - 1)
        if place == memory.level:
            memory.calm = 0
            return
        now = costs_s[memory.level]
        stronger = place > memory.level
        least_s = UNMEASURED_S if not memory.compute_s else 0.0
        # The first steps, in which things are compiled, make any exchange look hidden: one of three is no median.
        early = 0 < len(memory.compute_s) < ENOUGH
        if (now < GAIN * best or now - costs_s[place] < least_s) if stronger else early:
            memory.calm = 0
            return
        # Regrets are for settings that are much alike: the more a stronger one saves, the fewer notes it takes.
        worth = (now / best - 1) / (GAIN - 1) if stronger else 1.0
        memory.calm += int(worth * max(1, notes)) if memory.calm else 1
        at_once = stronger and memory.moved
        if at_once or (memory.since >= SETTLING and memory.calm >= PATIENCE[memory.regrets]):
            if memory.turned_at and memory.milder == stronger and memory.notes - memory.turned_at < REGRET:
                memory.regrets = min(len(PATIENCE) - 1, memory.regrets + 1)
            memory.turned_at, memory.milder = memory.notes, not stronger
            link, new_ms, now_ms = rate_text(memory.link_bps), 1e3 * expected[place], 1e3 * expected[memory.level]
            self._change(place, f"link {link}, {new_ms:.3g} ms a step in place of {now_ms:.3g}")

    def _change(self, index: int, why: str) -> None:
        memory = self.memory
        if index == memory.level:
            return
        self._news.append(f"{self.setting.name} → {self.levels[index].name}: {why}")
        memory.level = index
        memory.changes += 1
        memory.since = memory.calm = 0
        memory.exposed_s, memory.encoded_s = [], []
        memory.moved = memory.probe = False
        memory.probe_in = max(memory.probe_in, FEWEST)

    def _complain(self, kind: str, text: str) -> None:
        """Says it once."""
        if kind not in self.memory.said:
            self.memory.said.append(kind)
            self._news.append(text)
