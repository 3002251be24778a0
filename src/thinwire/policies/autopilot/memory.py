"""What the controller remembers between steps; travels with a checkpoint as text."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import msgspec

from thinwire.errors import ConfigError, check_keys

Hex = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]
"""Bytes of a note, as `bytes.hex` has them."""


class SavedState(msgspec.Struct):
    """What travels with a checkpoint as text, every bit of it."""

    asked_as: ClassVar[str] = "codec='auto'"
    """What the user wrote, for messages."""

    def state(self) -> str:
        """Returns all of it as text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_state(cls, text: str) -> Self:
        """Returns what `state` returned. Raises ConfigError where it cannot be that."""
        try:
            held = msgspec.json.decode(text, type=dict)
            check_keys(held, cls.__struct_fields__, f"the state of {cls.asked_as} cannot be read: it")
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the state of {cls.asked_as} cannot be read: {error}") from error


class Memory(SavedState):
    """Plain numbers.

    Attributes:
        level: index of the setting in use.
        notes: steps whose notes were taken.
        since: of them, those at the setting in use.
        changes: how often the setting has changed.
        link_bps: bits per second of the slowest link; 0 where it is unknown.
        moved: whether the link has changed since the setting last did.
        latency_s: seconds of waiting beyond bytes over rate, by whether a step is "compressed" or "all-reduced".
        step_s, compute_s, overlap_s: of the last steps.
        exposed_s, encoded_s: of the last steps at the setting in use.
        bits: by setting, measured bits a value.
        codec_s: by setting, measured seconds of encoding and decoding.
        excess_s: by setting, measured seconds beyond the model's.
        measured_at: by setting, the note after which these two were measured last.
        norm: mean of log₂ of the gradient's norm, over `norms` steps.
        lag: the longest of any residual, as told last, in steps.
        doubts: steps in a row that are slower or faster than the link lets expect, weighted by how much.
        guard: steps for which the setting stays mild.
        calm: notes for which another setting has been wanted.
        content: decisions in a row for the setting in use.
        regrets: changes that were soon taken back.
        turned_at: the note after which the setting changed last, and `milder` whether it became milder then.
        probe: whether the link is to be measured before the next step.
        probe_in: notes until it is measured anyway; steps, where notes do not tell of the link.
        alarm_in: notes until a doubt may have it measured, and `alarm_gap` what that is set to.
        doubted: the kind of steps that the link is doubted for, and `doubted_s` the least of what their messages took
            longer than their bytes.
        doubted_bps: the rate that these messages have had, the best of them; 0 without doubts.
        credit: measurements of the link that doubts may ask for.
        denied, denied_s: the doubts in a row that were wrong last, and that time of theirs.
        rest: notes until the next decision, and `resting` how many they were.
        note_gap: uncompressed steps from one note to the next, without doubts.
        asked: whether every rank is to tell of the next step, as half of them or more have told of the last one.
        said: what was complained of, once each.
    """

    level: int = 0
    notes: int = 0
    since: int = 0
    changes: int = 0
    link_bps: float = 0.0
    moved: bool = False
    latency_s: dict[str, float] = {}
    step_s: list[float] = []
    compute_s: list[float] = []
    overlap_s: list[float] = []
    exposed_s: list[float] = []
    encoded_s: list[float] = []
    bits: dict[str, float] = {}
    codec_s: dict[str, float] = {}
    excess_s: dict[str, float] = {}
    measured_at: dict[str, int] = {}
    norm: float = 0.0
    norms: int = 0
    lag: float = 0.0
    doubts: int = 0
    guard: int = 0
    calm: int = 0
    content: int = 0
    regrets: int = 0
    turned_at: int = 0
    milder: bool = False
    probe: bool = True
    probe_in: int = 0
    alarm_in: int = 0
    alarm_gap: int = 0
    doubted: str = "compressed"
    doubted_s: float = 0.0
    doubted_bps: float = 0.0
    credit: float = 0.0
    denied: int = 0
    denied_s: float = 0.0
    rest: int = 0
    resting: int = 1
    note_gap: int = 1
    asked: bool = False
    said: list[str] = []

    @classmethod
    def from_state(cls, text: str) -> Self:
        """Returns what `state` returned. Raises ConfigError where it cannot be that."""
        found = super().from_state(text)
        if found.level < 0:
            raise ConfigError(f"the state of {cls.asked_as} cannot be read: it has setting {found.level}")
        return found
