"""A training over a link of a given rate, computed: what its ranks would measure, and what the controller then does."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.policies.autopilot.costs import Workload
from thinwire.policies.autopilot.levels import Level, levels
from thinwire.policies.autopilot.notes import StepNote
from thinwire.policies.autopilot.pilot import Pilot

WORK = Workload(coded=300_000, plain=2_000, ranks=4, groups=1, uncompressed_nbytes=4 * 302_000)
BITS = dict(zip((level.name for level in levels()), (32, 16, 8, 0.45, 0.33, 0.22, 0.16, 0.13, 0.11), strict=True))
COMPUTE_S, CODEC_S, LATENCY_S = 0.01, 0.003, 0.0005


def notes(level: Level, bps: float) -> list[StepNote]:
    """What four ranks measure of a step; all but the last wait for another's computation, too."""
    sent = WORK.nbytes(level, BITS[level.name])
    link_s = 8 * sent / bps + LATENCY_S
    codec_s = 0.0 if level.codec is None else CODEC_S
    return [
        StepNote(
            COMPUTE_S + codec_s + link_s,
            codec_s + link_s + waits,
            0.002,
            link_s + waits,
            codec_s,
            0.0 if level.codec is None else sent,
            2.0,
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
