"""Elias-gamma coded signed levels: small magnitudes, which QSGD makes most often, take few bits (QSGD §3.3).

x = |level| + 1 of z + 1 bits is z zeros, a one, and the z lower bits of x, lowest first; a sign bit follows unless the
level is 0: 0 takes one bit, ±1 four, ±3 six. Bit 0 of the stream is the lowest bit of the first byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.jit import frozen, jit

_FAULTS = {1: "end too early", 2: "hold one that is too large", 3: "leave bits over"}


def longest(top: int) -> int:
    """Bits of the longest code of levels −top … top, top ≥ 1."""
    return 2 * (top + 1).bit_length()


def encode_levels(levels: NDArray[np.int16], *, top: int) -> Bytes:
    """Encodes signed levels −top … top."""
    codes, lengths = _table(top)
    coded, length = codes[levels + np.int32(top)], lengths[levels + np.int32(top)]
    starts = length.cumsum() - length
    bits = np.zeros(int(length.sum()), np.uint8)
    for at in range(int(length.max())):
        some = length > at
        bits[starts[some] + at] = coded[some] >> at & 1
    return np.packbits(bits, bitorder="little")


def decode_levels(packed: Any, *, top: int, out: NDArray[np.int16]) -> None:
    """Fills `out` with levels; raises FrameError where the bits are no such levels."""
    if fault := _decode(frozen(np.frombuffer(packed, np.uint8)), top, out):
        raise FrameError(f"the coded levels {_FAULTS[fault]}: the payload is damaged")


def _table(top: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Codes and their lengths, for the levels −top … top."""
    level = np.arange(-top, top + 1)
    x = np.abs(level) + 1
    z = np.floor(np.log2(x)).astype(np.int64)
    low = x - (1 << z)
    codes = (1 << z) | low << (z + 1) | (level < 0).astype(np.int64) << (2 * z + 1)
    return codes, 2 * z + 1 + (level != 0)


@jit
def _decode(packed: Any, top: int, out: Any) -> int:
    """0, or the number of the fault."""
    held, filled, at = np.uint64(0), 0, 0
    for i in range(out.size):
        while filled <= 32 and at < packed.size:
            held |= np.uint64(packed[at]) << np.uint64(filled)
            filled += 8
            at += 1
        z = 0
        while z < filled and (held >> np.uint64(z)) & np.uint64(1) == np.uint64(0):
            z += 1
        if z > 15:
            return 2
        if 2 * z + 1 > filled:
            return 1
        low = (held >> np.uint64(z + 1)) & ((np.uint64(1) << np.uint64(z)) - np.uint64(1))
        level = (1 << z) + np.int64(low) - 1
        used = 2 * z + 1
        if level > top:
            return 2
        if level > 0:
            if used + 1 > filled:
                return 1
            if (held >> np.uint64(used)) & np.uint64(1):
                level = -level
            used += 1
        out[i] = level
        held >>= np.uint64(used)
        filled -= used
    return 3 if held != np.uint64(0) or filled >= 8 or at < packed.size else 0
