"""A training over a link of a given rate, computed: what its ranks would measure, and what the controller then does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from thinwire.policies.autopilot.costs import Workload
from thinwire.policies.autopilot.levels import Level, levels
from thinwire.policies.autopilot.notes import StepNote, pack_note, unpack_note
from thinwire.policies.autopilot.pilot import Pilot

WORK = Workload(coded=300_000, plain=2_000, ranks=4, groups=1, uncompressed_nbytes=4 * 302_000)
BITS = dict(zip((level.name for level in levels()), (32, 16, 8, 0.45, 0.33, 0.22, 0.16, 0.13, 0.11), strict=True))
COMPUTE_S, CODEC_S, LATENCY_S = 0.01, 0.003, 0.0005


def notes(level: Level, bps: float, *, lag: float = 2.0, late_s: float = 0.0) -> list[StepNote]:
    """What four ranks measure of a step, whose messages may be late; all but the last wait for another's computation,
    too."""
    sent = WORK.nbytes(level, BITS[level.name])
    link_s = 8 * sent / bps + LATENCY_S + late_s
    codec_s = 0.0 if level.codec is None else CODEC_S
    return [
        StepNote(
            COMPUTE_S + codec_s + link_s,
            codec_s + link_s + waits,
            0.002,
            link_s + waits,
            codec_s,
            0.0 if level.codec is None else sent,
            lag,
            1.0,
        )
        for waits in (0.004, 0.001, 0.002, 0.0)
    ]


def train(pilot: Pilot, rates: Iterable[float]) -> list[str]:
    """Trains a step at each rate; returns the setting that each had. Notes of a step count from the next but one."""
    names, under_way = list[str](), list[tuple[list[StepNote], int]]()
    for bps in rates:
        if len(under_way) == 2:
            pilot.take(*under_way.pop(0))
        if pilot.wants_probe:
            pilot.take_link(bps)
        names.append(pilot.setting.name)
        under_way.append((notes(pilot.setting, bps), pilot.memory.level))
    return names


@dataclass(frozen=True)
class BusyTraining:
    """A training whose ranks share processors with others, so that every step is late by chance, and codecs vary.

    Args:
        values: of the model.
        compute_s, codec_s, zstd_s: of a step, of its codec, and what a second stage takes beyond that.
        late_s: mean of what messages are late by; one step in twenty is late by 30 ms more.
        ring_s: what uncompressed exchanges wait at a ring's hops.
    """

    values: int
    compute_s: float
    codec_s: float
    zstd_s: float
    late_s: float = 0.004
    ring_s: float = 0.0

    @property
    def work(self) -> Workload:
        return Workload(coded=self.values, plain=1000, ranks=4, groups=1, uncompressed_nbytes=4 * (self.values + 1000))

    def parts_s(self, level: Level, bps: float) -> tuple[float, float]:
        """Seconds of the codec and of messages, where nothing is late."""
        if level.codec is None:
            return 0.0, 8 * self.work.nbytes(level, 32) / bps + 0.002 + self.ring_s
        codec_s = self.codec_s + self.zstd_s * (level.codec.entropy is not None)
        return codec_s, 8 * self.work.nbytes(level, BITS[level.name]) / bps + 0.001

    def step_s(self, level: Level, bps: float) -> float:
        """Seconds of as far as a step of s = 1 comes."""
        return level.steps * (self.compute_s + sum(self.parts_s(level, bps)))

    def over_best(self, rates: Iterable[float], counted: int, seed: int) -> tuple[float, int, Pilot]:
        """Trains a step at each rate.

        Returns:
            The last steps' mean over the best setting's, how often the link was measured, and the controller.
        """
        chance, pilot, probes = Random(seed), Pilot(levels(), self.work), 0
        under_way, over = list[tuple[list[StepNote], int]](), list[float]()
        for bps in rates:
            if len(under_way) == 2:
                pilot.take(*under_way.pop(0))
            if pilot.wants_probe:
                probes += 1
                pilot.take_link(bps * chance.choice([1, 1, 0.95, 0.9, 0.8]))
            level = pilot.setting
            over.append(self.step_s(level, bps) / min(self.step_s(each, bps) for each in pilot.levels))
            late_s = chance.expovariate(1 / self.late_s) + 0.03 * (chance.random() < 0.05)
            told = [self._note(level, bps, late_s, 0.004 * chance.random() * bool(rank), chance) for rank in range(4)]
            under_way.append((told, pilot.memory.level))
        return sum(over[-counted:]) / counted, probes, pilot

    def _note(self, level: Level, bps: float, late_s: float, waits_s: float, chance: Random) -> StepNote:
        codec_s, link_s = self.parts_s(level, bps)
        codec_s, link_s = codec_s * chance.uniform(0.8, 1.5), link_s + late_s
        sent = 0.0 if level.codec is None else self.work.nbytes(level, BITS[level.name])
        step_s, exposed_s = self.compute_s + codec_s + link_s, codec_s + link_s + waits_s
        # As they travel: rounded.
        return unpack_note(pack_note(StepNote(step_s, exposed_s, 0.002, link_s + waits_s, codec_s, sent, 2.5, 1.0)))
