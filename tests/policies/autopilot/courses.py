"""Trainings over links that change by the clock, computed: seconds with the controller, and with every fixed setting.

Unlike `links`, the clock here is of all that a training waits for: its steps, and the controller's notes and
measurements of the link, whose messages take the longer the slower the link has become.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.policies.autopilot.links import BITS
from thinwire.policies.autopilot.costs import Workload
from thinwire.policies.autopilot.doubts import RECENT
from thinwire.policies.autopilot.levels import Level, levels
from thinwire.policies.autopilot.notes import StepNote, pack_note, unpack_note
from thinwire.policies.autopilot.pilot import Pilot
from thinwire.policies.autopilot.probing import PROBE_ENOUGH_S, probe
from thinwire.policies.autopilot.rhythm import ALARM_S

Course = Callable[[float], float]
"""Bits per second at a moment, in seconds."""
WARM_UP, UNLIMITED = 20, 2e10
PROBE_NBYTES = tuple(1 << power for power in range(14, 24, 2))
GATHER_S, NOTE_S = 0.001, 0.0005


def stepping(*bps: float, every_s: float) -> Course:
    """One rate after another, and again from the first."""
    return lambda now_s: bps[int(now_s // every_s) % len(bps)]


@dataclass
class Trained:
    """What a training of so many steps took."""

    seconds: float = 0.0
    probing_s: float = 0.0
    probes: int = 0
    settings: list[str] = field(default_factory=list)

    @property
    def changes(self) -> int:
        return sum(now != before for before, now in zip(self.settings, self.settings[1:], strict=False))


@dataclass(frozen=True)
class TimedTraining:
    """A training with the clock on.

    Args:
        values: of the model.
        compute_s, codec_s: of a step, and of its codec; a second stage takes a third more.
        late_s: mean of what messages are late by; one step in fifty is late by 20 ms more.
    """

    values: int
    compute_s: float
    codec_s: float
    late_s: float = 0.0005

    @property
    def work(self) -> Workload:
        return Workload(coded=self.values, plain=1000, ranks=4, groups=1, uncompressed_nbytes=4 * (self.values + 1000))

    def parts_s(self, level: Level, bps: float) -> tuple[float, float]:
        """Seconds of the codec and of messages, where nothing is late."""
        codec_s = 0.0 if level.codec is None else self.codec_s * (1 if level.codec.entropy is None else 4 / 3)
        return codec_s, 8 * self.work.nbytes(level, BITS[level.name]) / bps + 0.001

    def fixed(self, course: Course, steps: int, seed: int) -> float:
        """Returns the seconds of as far as so many steps of s = 1 come, with the best fixed setting."""
        return min(self._alone(level, course, steps, seed) for level in levels())

    def auto(self, course: Course, steps: int, seed: int) -> Trained:
        """Trains as far with the controller, which has warmed up on a link without a limit."""
        pilot, taken, chance = Pilot(levels(), self.work), Trained(), Random(seed)
        under_way, since_note = list[tuple[list[StepNote], int]](), 0
        alarm = _Alarm(pilot)
        step, gone = -WARM_UP, 0.0
        while gone < steps:
            if step == 0:
                taken = Trained()
            bps = UNLIMITED if step < 0 else course(taken.seconds)
            if len(under_way) == 2:
                told, at = under_way.pop(0)
                if told:
                    pilot.take(told, at)
            alarm.report()
            if pilot.wants_probe:
                alarm.waits_s.clear()
                before = taken.seconds
                self._probe(pilot, taken, course if step >= 0 else lambda _: UNLIMITED, chance)
                taken.probing_s += taken.seconds - before
                taken.probes += 1
                bps = UNLIMITED if step < 0 else course(taken.seconds)
            level, since_note = pilot.setting, since_note + 1
            codec_s, link_s = self.parts_s(level, bps)
            late_s = self._late_s(seed, step)
            taken.seconds += self.compute_s + codec_s + link_s + late_s
            taken.settings.append(level.name)
            told = []
            if level.codec is not None or since_note >= pilot.note_every:
                taken.seconds += NOTE_S if level.codec is None else 0.0
                since_note = 0
                told = [self._note(level, codec_s, link_s + late_s, chance) for _ in range(4)]
            taken.seconds += alarm.next_step(level, link_s + late_s)
            under_way.append((told, pilot.memory.level))
            gone += (step >= 0) / level.steps
            step += 1
        return taken

    def _late_s(self, seed: int, step: int) -> float:
        chance = Random(f"{seed} {step}")
        return chance.expovariate(1 / self.late_s) + 0.02 * (chance.random() < 0.02)

    def _alone(self, level: Level, course: Course, steps: int, seed: int) -> float:
        now_s = 0.0
        for step in range(round(steps * level.steps)):
            now_s += self.compute_s + sum(self.parts_s(level, course(now_s))) + self._late_s(seed, step)
        return now_s

    def _probe(self, pilot: Pilot, taken: Trained, course: Course, chance: Random) -> None:
        """As a hook measures the link: messages that grow, which take their time."""

        def once(least_nbytes: int) -> float:
            for nbytes in [each for each in PROBE_NBYTES if 4 * each > least_nbytes] or PROBE_NBYTES[-1:]:
                spent_s = 8 * nbytes / course(taken.seconds) + chance.expovariate(1 / self.late_s)
                taken.seconds += spent_s + 2 * GATHER_S
                if spent_s >= PROBE_ENOUGH_S:
                    break
            return 8 * nbytes / spent_s

        probe(pilot, once)

    def _note(self, level: Level, codec_s: float, link_s: float, chance: Random) -> StepNote:
        sent = 0.0 if level.codec is None else self.work.nbytes(level, BITS[level.name])
        waits_s = 0.001 * chance.random()
        step_s, exposed_s = self.compute_s + codec_s + link_s, codec_s + link_s + waits_s
        lag = 0.0 if level.codec is None else 1.0 + level.sparsity
        note = StepNote(step_s, exposed_s, 0.002, link_s + waits_s, codec_s, sent, lag, 1.0)
        return unpack_note(pack_note(note))  # as it travels: rounded


class _Alarm:
    """What ranks hear of unmeasured steps: of step k before step k + 2, as a hook's tiny all-reduces tell it."""

    def __init__(self, pilot: Pilot) -> None:
        self._pilot, self._told, self._since = pilot, list[tuple[float, int]](), 0
        self.waits_s: list[float] = []

    def report(self) -> None:
        if len(self._told) == 2:
            heard_s, level = self._told.pop(0)
            if heard_s and level == self._pilot.memory.level:
                self._pilot.take_wait(heard_s)

    def next_step(self, level: Level, wait_s: float) -> float:
        """Returns what telling takes."""
        if level.codec is not None:
            self.waits_s.clear()
            self._told.clear()
            return 0.0
        self.waits_s = [*self.waits_s[1 - RECENT :], wait_s]
        self._since += 1
        telling = self._since >= self._pilot.alarm_every
        if telling:
            self._since = 0
        self._told.append((self._pilot.telling_s(self.waits_s) if telling else 0.0, self._pilot.memory.level))
        return ALARM_S if telling else 0.0


def over_best(training: TimedTraining, course: Course, steps: int, seed: int) -> tuple[float, Trained]:
    """Returns the controller's seconds over the best fixed setting's, and what it did."""
    taken = training.auto(course, steps, seed)
    assert math.isfinite(taken.seconds)
    return taken.seconds / training.fixed(course, steps, seed), taken
