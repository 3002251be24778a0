"""The controller of `codec="auto"`: what a step costs at each setting, and which setting the next step has.

    step(setting) = computation + codec + max(0, bytes over the link − what hides behind the backward pass)

Settings that have been in use on this link cost what they were measured to take. The mildest setting within 3 % of the
cheapest is wanted, and taken where it saves 5 %; a setting stays for 8 steps at least.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from thinwire.errors import ConfigError, check_keys
from thinwire.policies.auto.levels import Level, Limits
from thinwire.quantities import ms_text, rate_text

NEAR, GAIN, UNTRIED = 1.03, 1.05, 1.05
"""Settings that cost so many times the least are as good; a change saves at least this; what a setting that was not in
use yet is expected to cost counts so many times."""
SETTLING, STAY, MOST_STAY = 2, 8, 512
"""Steps after a change that are not measured, as buffers and kernels are made; and until the next change, at least. It
is twice as many with every return to a setting that was in use before, where measurements contradict each other."""
ENOUGH, WINDOW = 3, 8
"""Notes that make a median, and the latest of them that are kept."""
DEPARTED, DEPARTED_S, ODD = 1.5, 3e-3, 2
"""A step departs from what is known by this factor and this many seconds; so many notes in a row are a doubt."""
OTHER_LINK = 1.25
"""By this factor a link differs from what it was."""
UNMEASURED_S = 0.05
"""Before any step is measured, uncompressed exchanges that take longer than this are not tried."""
NOTE_S, NOTE_SHARE, MOST_STEPS = 2e-3, 0.005, 64
"""What a note takes, and of the time; steps from one note to the next, at most."""
PROBE_S, PROBE_BITS, PROBE_SHARE, MOST_PROBES = 0.05, 8 * 65536, 0.005, 4096
"""What a measurement of the link takes, in seconds and bits, and of the time; steps between two of them, at most."""
LONGEST_S = 86_400.0
_MESSAGE_S = 1e-4
"""CPU time of a message, sent and received."""
_MESSAGE_NBYTES = 80
"""The heads of a packet and its frames, roughly."""
_NOTE = struct.Struct("<6f")

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Whole numbers, and seconds or rates, as a state may hold them."""
Optimizer = Literal["unknown", "sgd", "adaptive"]
_OPTIMIZERS: tuple[Optimizer, ...] = ("unknown", "sgd", "adaptive")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What ranks exchange in a step.

    Args:
        coded: values that settings compress.
        plain: values that always travel as float32.
        ranks: how many exchange.
        groups: messages that a rank sends another in each direction.
        uncompressed_nbytes: of all gradients in their own dtypes.
        pulls: whether averages travel too, as they do but in a reduce-scatter.
        blocking: whether the backward pass waits for every uncompressed reduction.
    """

    coded: int
    plain: int
    ranks: int
    groups: int
    uncompressed_nbytes: int
    pulls: bool = True
    blocking: bool = False

    @property
    def _messages(self) -> int:
        return (2 if self.pulls else 1) * (self.ranks - 1) * self.groups

    @property
    def _passes(self) -> float:
        """How often a rank sends its values: 2·(N − 1)/N times, or half of it."""
        return (2 if self.pulls else 1) * (self.ranks - 1) / self.ranks

    def nbytes(self, level: Level, bits: float) -> float:
        """Returns the bytes that a rank sends in a step at a level, with so many bits a value."""
        if level.codec is None:
            return self._passes * self.uncompressed_nbytes
        return self._passes * (self.coded * bits / 8 + 4 * self.plain) + _MESSAGE_NBYTES * self._messages

    def bits(self, sent_nbytes: float) -> float:
        """Returns the bits of a compressed value, from the bytes that a rank has sent."""
        whole = sent_nbytes - _MESSAGE_NBYTES * self._messages - self._passes * 4 * self.plain
        return max(0.01, 8 * whole / max(1.0, self._passes * self.coded))

    def codec_s(self, level: Level) -> float:
        """Returns the seconds that a level's codec and messages are expected to take, until they are measured."""
        return 0.0 if level.codec is None else 1e-9 * level.codec_ns * self.coded + _MESSAGE_S * self._messages

    def hidden_s(self, level: Level, overlap_s: float) -> float:
        """Returns how long messages travel behind a backward pass that takes `overlap_s` after its first gradients."""
        if level.codec is None:
            return 0.0 if self.blocking else overlap_s
        return overlap_s * (1 - 1 / max(1, self.groups))


class Note(NamedTuple):
    """The message of a rank to the others about its latest steps at one setting: medians, in seconds.

    Args:
        step_s: from a step's first gradients to the next one's; 0 where none was measured.
        exposed_s: from the last gradients to the last average, which the training loop waits for; 0 where it is
            not measured, as on a GPU.
        overlap_s: from the first gradients to the last, behind which an exchange hides.
        codec_s: of encoding, decoding and copying.
        sent_nbytes: bytes sent; 0 where all-reduces sent them.
        optimizer: place in "unknown", "sgd", "adaptive".
    """

    step_s: float = 0.0
    exposed_s: float = 0.0
    overlap_s: float = 0.0
    codec_s: float = 0.0
    sent_nbytes: float = 0.0
    optimizer: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether steps were measured, by a clock that has not jumped."""
        return 0 < self.step_s <= LONGEST_S and all(0 <= each <= 1e15 for each in self)

    def pack(self) -> bytes:
        """Returns the note as bytes, `NOTE_NBYTES` of them.

        >>> Note.unpack(Note(step_s=0.5, optimizer=2).pack()).step_s
        0.5
        """
        return _NOTE.pack(*(min(each, 1e30) for each in self))

    @classmethod
    def unpack(cls, data: bytes) -> Note:
        """Returns what `pack` packed, as all ranks read it."""
        return cls._make(_NOTE.unpack(data))


NOTE_NBYTES = _NOTE.size


class Memory(msgspec.Struct):
    """What the controller knows; plain numbers, which travel with a checkpoint.

    Attributes:
        level: index of the setting in use.
        since: steps since it is, and `stay` how many it stays at least.
        changes: how often it has changed.
        link_bps: bits per second of the slowest link; 0 where it is unknown.
        optimizer: what all ranks' optimizers are: "adaptive" where any is, "unknown" where any is.
        window: the latest notes of steps at this setting, of all ranks in one: step, exposed and overlap in seconds.
        compute_s, overlap_s: seconds of a step without its exchange, and of its backward pass after the first
            gradients; 0 until they are known.
        codec_s, bits: of settings that were in use, by name: seconds of coding, bits a value.
        seen_s: by name, a step's seconds at settings that were in use on this link.
        odd: notes in a row of steps that took much longer or shorter than those before.
        probe_in: steps until the link is measured, and `doubts_in` until a doubt may have that done.
        doubts: measurements in a row for doubts that found the same link.
        used, changed_at: the setting of the last step, and the step since which it is in use.
        notes, since_note: how often ranks have told each other, and steps since they last did.
    """

    level: Count = 0
    since: Count = STAY
    stay: Count = STAY
    changes: Count = 0
    link_bps: Amount = 0.0
    optimizer: Optimizer = "unknown"
    window: list[tuple[Amount, Amount, Amount]] = []
    compute_s: Amount = 0.0
    overlap_s: Amount = 0.0
    codec_s: dict[str, Amount] = {}
    bits: dict[str, Amount] = {}
    seen_s: dict[str, Amount] = {}
    odd: Count = 0
    probe_in: int = 0
    doubts_in: int = 0
    doubts: Count = 0
    used: Count = 0
    changed_at: Count = 0
    notes: Count = 0
    since_note: Count = 0

    def state(self) -> str:
        """Returns all of it as text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_state(cls, text: str) -> Memory:
        """Returns what `state` returned. Raises ConfigError where it cannot be that."""
        what = "the state of codec='auto' cannot be read: it"
        try:
            check_keys(msgspec.json.decode(text, type=dict), cls.__struct_fields__, what)
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the state of codec='auto' cannot be read: {error}") from error


class Controller:
    """Chooses a setting from the notes of all ranks; on each of them the same, as all have the same numbers.

    Before every step: `take` what ranks told, if they did; `take_link` a measurement where `wants_probe`; then
    `begin_step`, and the step has `levels[memory.level]`. Ranks tell each other every `note_every` steps.

    Args:
        levels: the settings, from the mildest.
        work: what is exchanged.
        limits: what the user asks.

    Attributes:
        memory: all that it knows.
        held_back: whether fewer bits would be faster, and the optimizer is adaptive.
    """

    def __init__(self, levels: Sequence[Level], work: Workload, limits: Limits) -> None:
        self.levels, self._work, self._limits = tuple(levels), work, limits
        self.memory = Memory()
        self.held_back = False
        self._news: list[str] = []

    @property
    def setting(self) -> Level:
        """The setting of the next step."""
        return self.levels[self.memory.level]

    @property
    def wants_probe(self) -> bool:
        """Whether the link is to be measured before the next step."""
        memory = self.memory
        return not memory.link_bps or memory.probe_in <= 0 or (memory.odd >= ODD and memory.doubts_in <= 0)

    @property
    def note_every(self) -> int:
        """Steps from one note to the next: few while something is new or odd."""
        memory = self.memory
        if memory.odd or len(memory.window) < ENOUGH:
            return 1
        return min(MOST_STEPS, math.ceil(NOTE_S / (NOTE_SHARE * self._step_s())))

    def begin_step(self) -> None:
        """Counts a step."""
        memory = self.memory
        memory.since += 1
        memory.probe_in -= 1
        memory.doubts_in -= 1

    def take(self, notes: Sequence[Note], level: int) -> None:
        """Takes the notes of all ranks, of steps at a level; it may change the setting."""
        memory = self.memory
        told = [_OPTIMIZERS[int(note.optimizer)] if note.optimizer in (1, 2) else "unknown" for note in notes]
        optimizer: Optimizer = "adaptive" if "adaptive" in told else "unknown" if "unknown" in told else "sgd"
        if optimizer != memory.optimizer:
            memory.optimizer, memory.since = optimizer, max(memory.since, memory.stay)
        good = [note for note in notes if note.usable]
        if good and level == memory.level:
            self._measure(good)
        if len(memory.window) >= ENOUGH or not memory.compute_s:
            self._decide()

    def take_link(self, bps: float) -> None:
        """Takes a measurement of the link; it may change the setting."""
        memory, known, doubted = self.memory, self.memory.link_bps, self.memory.odd >= ODD
        changed = not known or not 1 / OTHER_LINK < bps / known < OTHER_LINK
        if doubted:
            memory.doubts = 0 if changed else min(6, memory.doubts + 1)
            memory.doubts_in = STAY * 2**memory.doubts
        if changed or doubted:  # what was measured is of another link, or of another computation
            memory.seen_s, memory.window, memory.odd = {}, [], 0
        memory.link_bps = bps if changed else math.sqrt(bps * known)
        taken_s, step_s = PROBE_S + PROBE_BITS / memory.link_bps, max(1e-3, memory.compute_s)
        memory.probe_in = min(MOST_PROBES, max(256, math.ceil(taken_s / (PROBE_SHARE * step_s))))
        if changed:
            memory.stay = max(STAY, memory.stay // 4)
            memory.since = max(memory.since, memory.stay)
            self._decide()

    def news(self) -> list[str]:
        """Returns what has changed since this was asked last, in words."""
        news, self._news = self._news, []
        return news

    def __str__(self) -> str:
        """Returns in words which setting is in use, since which step, and what the link is known to be."""
        memory = self.memory
        link = f"link {rate_text(memory.link_bps)}" if memory.link_bps else "link not measured yet"
        times = "1 change" if memory.changes == 1 else f"{memory.changes} changes"
        used = self.levels[memory.used].name
        return f"{used} since step {memory.changed_at}, {times}, {link}, optimizer {memory.optimizer}"

    def load(self, memory: Memory) -> None:
        """Takes a memory back; of a setting that is not among the levels here the strongest takes the place."""
        memory.level, memory.used = (min(each, len(self.levels) - 1) for each in (memory.level, memory.used))
        self.memory = memory

    # ---- what was measured

    def _measure(self, notes: Sequence[Note]) -> None:
        memory, setting = self.memory, self.setting
        step_s, overlap_s = (median([note[place] for note in notes]) for place in (0, 2))
        exposed_s = min(note.exposed_s for note in notes)  # a rank that comes last waits for the link alone
        if setting.codec is not None:
            memory.codec_s[setting.name] = median([note.codec_s for note in notes])
            memory.bits[setting.name] = self._work.bits(max(note.sent_nbytes for note in notes))
        if len(memory.window) >= ENOUGH:
            known_s = self._step_s()
            ratio, beyond_s = step_s / known_s, abs(step_s - known_s)
            if not 1 / DEPARTED < ratio < DEPARTED and beyond_s > DEPARTED_S:
                memory.odd += 1
                return
        memory.odd = 0
        memory.window = [*memory.window, (step_s, exposed_s, overlap_s)][-WINDOW:]
        if len(memory.window) >= ENOUGH and memory.link_bps:
            step_s, exposed_s, memory.overlap_s = (median(column) for column in zip(*memory.window, strict=True))
            seen_s = self._communication_s(setting)
            if setting.codec is None and exposed_s:  # what the link does not explain, fewer bytes do not save
                seen_s = min(exposed_s, self._link_s(setting))
            memory.compute_s = max(1e-6, step_s - seen_s)
            memory.seen_s[setting.name] = step_s

    def _step_s(self) -> float:
        return median([step_s for step_s, _, _ in self.memory.window])

    # ---- the decision

    def costs_s(self) -> list[float]:
        """Returns what a step is expected to cost at each level, in seconds of a step with s = 1."""
        memory = self.memory
        expected_s = [UNTRIED * (memory.compute_s + self._communication_s(level)) for level in self.levels]
        return [
            level.steps * memory.seen_s.get(level.name, step_s)
            for level, step_s in zip(self.levels, expected_s, strict=True)
        ]

    def _communication_s(self, level: Level) -> float:
        """Returns the seconds that a step takes for its exchange: coding, and what of the link does not hide."""
        memory, work, setting = self.memory, self._work, self.setting
        if (codec_s := memory.codec_s.get(level.name)) is None:
            known_s = memory.codec_s.get(setting.name)
            codec_s = work.codec_s(level) * (1.0 if known_s is None else known_s / work.codec_s(setting))
        return codec_s + max(0.0, self._link_s(level) - work.hidden_s(level, memory.overlap_s))

    def _link_s(self, level: Level) -> float:
        memory = self.memory
        return 8 * self._work.nbytes(level, memory.bits.get(level.name, level.bits)) / memory.link_bps

    def _decide(self) -> None:
        memory = self.memory
        if not memory.link_bps:
            return
        measured, costs_s = memory.compute_s > 0, self.costs_s()
        allowed = [place for place, level in enumerate(self.levels) if level.mild or memory.optimizer == "sgd"]
        choices = [place for place in allowed if measured or self.levels[place].steps == 1]
        best_s, now_s = min(costs_s[place] for place in choices), costs_s[memory.level]
        self.held_back = memory.optimizer == "adaptive" and measured and best_s > GAIN * min(costs_s)
        must = memory.level not in allowed
        if not must and (memory.since < memory.stay or not (measured or now_s > UNMEASURED_S)):
            return
        if self._limits.target == "bytes":
            self._change(allowed[-1], "the fewest bytes that the lag and the optimizer allow")
            return
        wanted = next(place for place in choices if costs_s[place] <= NEAR * best_s)
        if must or now_s > GAIN * costs_s[wanted]:
            link = rate_text(memory.link_bps)
            self._change(wanted, f"link {link}, {ms_text(costs_s[wanted])} a step in place of {ms_text(now_s)}")

    def _change(self, place: int, why: str) -> None:
        memory = self.memory
        if place == memory.level:
            return
        self._news.append(f"{self.setting.name} → {self.levels[place].name}: {why}")
        if self.levels[place].name in memory.seen_s:
            memory.stay = min(MOST_STAY, 2 * memory.stay)
        memory.level = place
        memory.changes += 1
        memory.since = memory.odd = 0
        memory.window = []
