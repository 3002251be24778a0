"""What a step would take at each level: as measured where it has been in use, else as measured levels make likely."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from thinwire.policies.autopilot.costs import Workload
from thinwire.policies.autopilot.levels import Level
from thinwire.policies.autopilot.memory import Memory
from thinwire.policies.autopilot.notes import StepNote

TOLERANCE = 1.03
"""The mildest setting that costs at most so many times the best one is wanted."""
WINDOW, ENOUGH = 5, 3
"""Steps whose median counts, and how many it takes of a setting's."""
UNTRIED = 0.5
"""Of what an uncompressed exchange takes beyond the model, a compressed one is expected to take, until one has been in
use: on busy processors a ring waits at every hop, and a link that is slower than it is known to be delays fewer bytes
less. More, and nobody would ever find out."""
NEWEST = 0.2
"""Weight of what was found last in what a setting takes beyond the model. It is left for another just when it seems to
take most, and chance alone would keep it from being taken again."""
STALE = 500
"""Notes after which nobody knows any longer what a setting takes that is not in use."""
Known = list[tuple[str, int, float]]
"""Codec, place and ratio of measured to expected, by level that has been measured."""


class Estimates:
    """Reads and writes what the memory holds of steps.

    Steps are taken one by one, and cheaply; medians are found when a decision needs them.

    Args:
        levels: the settings, from the mildest.
        work: what is exchanged in a step.
        memory: where everything is kept.
    """

    def __init__(self, levels: Sequence[Level], work: Workload, memory: Memory) -> None:
        self._levels, self._work, self._memory = levels, work, memory
        self._bits = {level.name: level.bits for level in levels}
        self._codec_s = {level.name: work.codec_s(level) for level in levels}

    # ---- steps

    def take_step(self, step_s: float) -> None:
        """Takes the seconds of a step."""
        _push(self._memory.step_s, step_s)

    def take_computation(self, step_s: float, exposed_s: float, notes: Sequence[StepNote]) -> None:
        """Takes what of a step was computation, and what an exchange can hide behind."""
        _push(self._memory.compute_s, max(0.0, step_s - exposed_s))
        _push(self._memory.overlap_s, median([note.overlap_s for note in notes]))

    def take_exchange(self, exposed_s: float, notes: Sequence[StepNote]) -> None:
        """Takes what of a step at the setting in use its exchange was."""
        _push(self._memory.exposed_s, exposed_s)
        _push(self._memory.encoded_s, median([note.codec_s for note in notes]))

    def take_sent(self, level: Level, sent_nbytes: float) -> None:
        """Takes the bytes that a rank has sent in a step at a level."""
        bits, name = self._memory.bits, level.name
        found = self._work.bits(sent_nbytes)
        bits[name] = 0.7 * bits[name] + 0.3 * found if name in bits else found

    def settle(self) -> None:
        """Takes what steps at the setting in use have cost beyond what the model says; before anything changes."""
        memory = self._memory
        for other, at in list(memory.measured_at.items()):
            if memory.notes - at > STALE:
                del memory.measured_at[other], memory.codec_s[other]
                memory.excess_s.pop(other, None)
        if len(memory.exposed_s) >= ENOUGH and memory.link_bps:
            name = self._levels[memory.level].name
            memory.codec_s[name] = median(memory.encoded_s)
            found = self._exchanges_s(memory.level, memory.level, memory.link_bps)[0]
            excess_s = median(memory.exposed_s) - found
            known_s = memory.excess_s.get(name, excess_s)
            memory.excess_s[name] = known_s + NEWEST * (excess_s - known_s)
            memory.measured_at[name] = memory.notes

    def forget_exchanges(self) -> None:
        """The link is another one: what its messages took beyond their bytes is of the past, at every setting."""
        memory = self._memory
        memory.exposed_s.clear()
        memory.encoded_s.clear()
        memory.latency_s.clear()
        memory.excess_s.clear()

    # ---- what they say

    @property
    def usual_step_s(self) -> float:
        """Seconds of a step as it was of late; 1 before any."""
        return max(1e-3, median(self._memory.step_s)) if self._memory.step_s else 1.0

    def steps_s(self, most: int, bps: float) -> list[float]:
        """Returns the seconds that a step is expected to take at each level up to `most`, on a link of that rate."""
        compute_s = median(self._memory.compute_s) if self._memory.compute_s else 0.0
        excess_s = self._excesses_s(most)
        exchanges_s = self._exchanges_s(0, most, bps)
        return [compute_s + max(0.0, exchange + excess) for exchange, excess in zip(exchanges_s, excess_s, strict=True)]

    def _exchanges_s(self, first: int, last: int, bps: float) -> list[float]:
        """What of an exchange the training loop waits for, as the model has it, at levels from `first` to `last`."""
        memory, work = self._memory, self._work
        overlap_s = median(memory.overlap_s) if memory.overlap_s else 0.0
        bits, codecs = self._ratios(memory.bits, self._bits), self._ratios(memory.codec_s, self._codec_s)
        found = []
        for place in range(first, last + 1):
            level = self._levels[place]
            nbytes = work.nbytes(level, _known(level, place, memory.bits, self._bits, bits, alone=True))
            codec_s = _known(level, place, memory.codec_s, self._codec_s, codecs)
            found.append(codec_s + max(0.0, 8 * nbytes / bps - work.hidden(level, overlap_s)))
        return found

    def _ratios(self, measured: dict[str, float], expected: dict[str, float]) -> Known:
        return [
            (level.codec.id, place, measured[level.name] / expected[level.name])
            for place, level in enumerate(self._levels)
            if level.codec is not None and level.name in measured
        ]

    def _excesses_s(self, most: int) -> list[float]:
        """Measured, or that of the nearest level in use so far: what delays one exchange delays others like it too."""
        excess, levels = self._memory.excess_s, self._levels
        known = [
            (level.codec is None, place, excess[level.name])
            for place, level in enumerate(levels)
            if level.name in excess
        ]
        found = []
        for place, level in enumerate(levels[: most + 1]):
            if level.name in excess or level.codec is None or not known:
                found.append(excess.get(level.name, 0.0))
            else:
                plain, _, nearest_s = min((plain, abs(place - other), s) for plain, other, s in known)
                found.append(max(0.0, UNTRIED * nearest_s if plain else nearest_s))
        return found


def wanted(costs_s: Sequence[float]) -> int:
    """Returns the mildest level that hardly costs more than the best one.

    >>> wanted([0.105, 0.102, 0.1])
    1
    """
    enough_s = TOLERANCE * min(costs_s)
    return next(place for place, seconds in enumerate(costs_s) if seconds <= enough_s)


def _known(
    level: Level,
    place: int,
    measured: dict[str, float],
    expected: dict[str, float],
    ratios: Known,
    *,
    alone: bool = False,
) -> float:
    """Measured; or expected, times what the nearest measured level differs from expectation.

    That is one of the same codec, or unless it counts `alone`, of another: much of what a codec takes on a busy
    machine is not its own.
    """
    name, codec = level.name, level.codec
    if name in measured or codec is None:
        return measured.get(name, expected[name])
    alike = [
        (other_id != codec.id, abs(place - other), ratio)
        for other_id, other, ratio in ratios
        if not alone or other_id == codec.id
    ]
    return expected[name] * max(0.1, min(10.0, min(alike)[-1])) if alike else expected[name]


def _push(window: list[float], value: float) -> None:
    window.append(value)
    if len(window) > WINDOW:
        del window[0]
