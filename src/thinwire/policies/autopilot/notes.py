"""What every rank tells the others of a step: eight numbers in sixteen bytes, on a message that travels anyway."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

LONGEST_S = 86_400.0
"""A step's times are shorter than this, and those of hundreds of local steps, or a clock has jumped."""
_FLOATS, _WORDS, _HALVES = struct.Struct("<8f"), struct.Struct("<8I"), struct.Struct("<8H")
_INFINITE, _ODD = 0x7F800000, 0x8000
_LARGEST = 3.4028234663852886e38


class StepNote(NamedTuple):
    """One step on one rank, as it was measured; times in seconds.

    Args:
        step_s: from this step's first gradients to the next one's.
        exposed_s: from the last gradients to the last average, which the training loop waits for.
        overlap_s: from the first gradients to the last, behind which an exchange hides.
        link_s: of waiting for messages, or of all-reduces under way; 0 where nobody sees these, as on a GPU.
        codec_s: of encoding, decoding and copying.
        sent_nbytes: bytes sent; 0 where all-reduces sent them.
        lag: the longest of any residual, in steps; 0 where none is measured.
        norm: log₂ of the norm of some of the gradient; NaN where it is not measured.
    """

    step_s: float
    exposed_s: float
    overlap_s: float
    link_s: float
    codec_s: float
    sent_nbytes: float
    lag: float
    norm: float

    @property
    def problem(self) -> str:
        """What cannot be of these numbers, in words; empty where all can."""
        step_s, exposed_s, overlap_s, link_s, codec_s, sent_nbytes, lag, _ = self
        if (
            0 <= step_s <= LONGEST_S
            and 0 <= exposed_s <= LONGEST_S
            and 0 <= overlap_s <= LONGEST_S
            and 0 <= link_s <= LONGEST_S
            and 0 <= codec_s <= LONGEST_S
            and 0 <= sent_nbytes < math.inf
            and 0 <= lag < math.inf
        ):
            return ""  # as nearly always: eight notes a step are looked at
        for name, value in zip(self._fields, self[:7], strict=False):
            if not math.isfinite(value) or value < 0 or (name.endswith("_s") and value > LONGEST_S):
                return f"{name} = {value:g}"
        return ""


NOTE_NBYTES = 2 * len(StepNote._fields)


def pack_note(note: StepNote) -> bytes:
    """Returns a note as bytes: the upper halves of its numbers as float32, which is 0.4 % exact.

    Example:
        >>> note = StepNote(0.1, 0.02, 0.03, 0.01, 0.001, 13_000, 2.5, -3.2)
        >>> len(pack_note(note)), unpack_note(pack_note(note)).sent_nbytes
        (16, 12992.0)
    """
    try:
        words = _WORDS.unpack(_FLOATS.pack(*note))
    except OverflowError:  # more than a float32 holds
        words = _WORDS.unpack(_FLOATS.pack(*(math.copysign(math.inf, n) if abs(n) > _LARGEST else n for n in note)))
    return _HALVES.pack(*[(word if word & _INFINITE == _INFINITE else word + _ODD) >> 16 for word in words])


def unpack_note(data: bytes | memoryview) -> StepNote:
    """Returns what `pack_note` packed, as all ranks read it."""
    words = bytearray(_FLOATS.size)
    words[2::4], words[3::4] = data[0::2], data[1::2]
    return StepNote._make(_FLOATS.unpack(words))
