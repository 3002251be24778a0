"""The frame format, version 1: its numbers, its fields as plain values, its integers. No torch, no sockets, no codec.

`docs/wire-format.md` describes the same format; a test compares the two.

A frame, little-endian, no holes, ends with the checksum:

    magic 2 · version 1 · codec 1 [· name] · flags 2 · dtype 1 · rank 1 · dims (varint each)
    · number of scales (varint) · scales (4 bytes each, 8 for fp64) · payload length (varint) · payload · xxh3 8

A codec number stands for one bit layout. A changed layout takes a new codec or a new version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntFlag

from thinwire.errors import FrameError

MAGIC = b"TW"
VERSION = 1

NAMED_CODEC = 0
"""Codec number of codecs that thinwire does not ship: the id follows, as a length byte and ASCII."""

_IDS = (
    "fp32 fp16 bf16 int8 3lc stoch3 terngrad mqe1 onebit topk randomk threshold qsgd dithering truncate entropy votes "
    "qsgd-ds blocktopk"
)
CODEC_NUMBERS: dict[str, int] = {codec: number for number, codec in enumerate(_IDS.split(), 1)}
"""Codec numbers by id, counted from 1; new ids are appended."""

DTYPE_NUMBERS: dict[str, int] = {"fp32": 1, "fp16": 2, "bf16": 3, "fp64": 4}

MAX_RANK = 32
MAX_VALUES = 2**40
"""Far above the size of any model's tensor; it keeps products of hostile dimensions far from overflow."""
MAX_SCALES = 2**24
"""Enough for one scale per column of a very wide layer, or per bucket of a large one."""


class Flags(IntFlag):
    """Low byte: the same meaning in every codec. High byte: options of the codec, see each codec."""

    ZSTD = 0x0001
    """The payload was compressed with zstd after the codec."""
    NON_FINITE = 0x0002
    """The sender's tensor held NaN or Inf: no payload, and all workers skip this step."""
    OPTION_A = 0x0100
    OPTION_B = 0x0200
    OPTION_C = 0x0400
    OPTION_D = 0x0800


ZSTD, NON_FINITE = int(Flags.ZSTD), int(Flags.NON_FINITE)
"""Plain integers for tests of every frame: an IntFlag costs ten times as much."""

KNOWN_FLAGS = sum(Flags)

OPTION_MASK = 0xFF00
"""The bits whose meaning depends on the codec."""

CHECKSUM_NBYTES = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """One encoded tensor with its header: what `pack` writes and `parse` reads.

    Args:
        codec: the codec's id, as in `tw.codecs()`.
        dtype: of the tensor that was encoded: `fp32`, `fp16`, `bf16` or `fp64`; `()` for a 0-d tensor.
        shape: of the tensor that was encoded: `fp32`, `fp16`, `bf16` or `fp64`; `()` for a 0-d tensor.
        scales: the full-precision scalars that the codec sends beside the payload.
        flags: see `Flags`.
        payload: the codec's bytes, which the papers count.
    """

    codec: str
    dtype: str
    shape: tuple[int, ...]
    scales: tuple[float, ...] = ()
    flags: int = 0
    payload: bytes | memoryview = b""
    version: int = VERSION

    @property
    def size(self) -> int:
        """Number of values in the encoded tensor."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of a value in full precision: float32, or float64 for float64 tensors."""
        return 8 if self.dtype == "fp64" else 4

    @property
    def non_finite(self) -> bool:
        """True where the sender refused its tensor (NaN or Inf): all workers skip the step."""
        return self.flags & NON_FINITE != 0

    @property
    def zstd(self) -> bool:
        """True where the payload was compressed by the zstd stage."""
        return self.flags & ZSTD != 0

    @property
    def bits_per_value(self) -> float:
        """Payload bits per value, as in the papers: without header and scales."""
        return 8 * len(self.payload) / self.size if self.size else 0.0


_MAX_VARINT_NBYTES = 9


def pack_varint(number: int) -> bytes:
    """Returns `number` (0 ≤ number < 2**63) as unsigned LEB128, 1 to 9 bytes.

    >>> pack_varint(300).hex()
    'ac02'
    """
    if 0 <= number < 0x4000:  # most numbers in a frame
        return bytes((number,) if number < 0x80 else (number & 0x7F | 0x80, number >> 7))
    if not 0 <= number < 1 << 63:
        raise ValueError(f"a varint holds 0 … 2**63 - 1, not {number}")
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def parse_varint(data: memoryview, at: int, what: str) -> tuple[int, int]:
    """Returns the number and the position after it. Raises FrameError where it is cut, too long or not shortest."""
    if at < len(data) and data[at] < 0x80:  # most numbers in a frame
        return data[at], at + 1
    number = 0
    for i in range(_MAX_VARINT_NBYTES):
        if at + i >= len(data):
            raise FrameError(f"the frame ends inside {what}, at byte {at + i}")
        byte = data[at + i]
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if byte == 0 and i:
                raise FrameError(f"{what} at byte {at} is not in its shortest form")
            return number, at + i + 1
    raise FrameError(f"{what} at byte {at} is longer than {_MAX_VARINT_NBYTES} bytes")
