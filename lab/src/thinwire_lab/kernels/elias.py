"""Elias-gamma coded signed levels: small magnitudes, which QSGD makes most often, take few bits (QSGD §3.3).

x = |level| + 1 of z + 1 bits is z zeros, a one, and the z lower bits of x, lowest first; a sign bit follows unless the
level is 0. So 0 takes one bit, ±1 four, ±3 six. Bit 0 of the stream is the lowest bit of the first byte.

Short codes are written four to a store, and read as many at a time as eleven bits hold: a table knows all of these.
Longer codes, and the last few, go one by one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.jit import frozen, jit, words_apart


def longest(top: int) -> int:
    """Bits of the longest code of levels −top … top, top ≥ 1."""
    return 2 * (top + 1).bit_length()


def encode_levels(levels: NDArray[np.int16], *, top: int, words: NDArray[np.uint32]) -> Bytes:
    """Encodes signed levels −top … top; `words` has room for `longest(top)` bits a level, and holds the result.

    >>> encode_levels(np.array([0, 1, -2], np.int16), top=2, words=np.empty(2, np.uint32)).tolist()
    [197, 1]
    """
    codes, lengths = _table(top)
    # Four codes and up to seven bits before them must fit a word, and eight bytes are stored at a time.
    fours = max(0, (words.nbytes - 16) * 8 // (4 * longest(top))) if 4 * longest(top) + 7 <= 64 else 0
    words_at = words_apart(words.view(np.uint8) if fours else _NOTHING, 1)
    num_bits = _encode(frozen(levels), top, codes, lengths, min(fours, levels.size // 4), words_at, words)
    return words.view(np.uint8)[: -(-num_bits // 8)]


def decode_levels(packed: Any, *, top: int, out: NDArray[np.int16]) -> None:
    """Fills `out` with levels."""
    received = frozen(np.frombuffer(packed, np.uint8))
    fast = received.size >= 16
    words_at = words_apart(received if fast else frozen(_NOTHING), 1)
    fault = _decode(received, top, fast, words_at, *_windows(), out)
    if fault:
        raise FrameError(f"the coded levels {_FAULTS[fault]}: the payload is damaged")


_FAULTS = {1: "end too early", 2: "hold one that is too large", 3: "leave bits over"}


_WINDOW = 11
"""Bits that are looked up at a time; as many levels may be in them, all zero."""
_NOTHING = np.zeros(16, np.uint8)  # stands in where a buffer is too short to be read by words


class _Windows(NamedTuple):
    """What each word of 11 bits begins with: how many whole levels, their bits, the largest magnitude, the levels."""

    counts: NDArray[np.int64]
    used: NDArray[np.int64]
    largest: NDArray[np.int64]
    levels: NDArray[np.int16]


@functools.cache
def _windows() -> _Windows:
    size = 1 << _WINDOW
    counts, used_bits, largest = (np.zeros(size, np.int64) for _ in range(3))
    windows = _Windows(counts, used_bits, largest, np.zeros((size, _WINDOW), np.int16))
    for word in range(size):
        used, found = 0, []
        while rest := word >> used:
            z = (rest & -rest).bit_length() - 1
            length = 2 * z + 1 + (z > 0)
            if used + length > _WINDOW:
                break
            level = (1 << z) + (rest >> (z + 1) & ((1 << z) - 1)) - 1
            found.append(-level if rest >> (2 * z + 1) & 1 and z else level)
            used += length
        windows.counts[word], windows.used[word] = len(found), used
        windows.largest[word] = max(map(abs, found), default=0)
        windows.levels[word, : len(found)] = found
    return windows


def _table(top: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Codes and their lengths, for the levels −top … top."""
    level = np.arange(-top, top + 1)
    x = np.abs(level) + 1
    z = np.floor(np.log2(x)).astype(np.int64)
    low = x - (1 << z)
    codes = (1 << z) | low << (z + 1) | (level < 0).astype(np.int64) << (2 * z + 1)
    return codes.astype(np.uint64), (2 * z + 1 + (level != 0)).astype(np.uint64)


@jit
def _encode(levels: Any, top: int, codes: Any, lengths: Any, num_fours: int, words_at: Any, words: Any) -> Any:
    """Bits written."""
    three, seven = np.uint64(3), np.uint64(7)
    held, filled, byte = np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(0, 4 * num_fours, 4):
        c0, c1, c2, c3 = levels[i] + top, levels[i + 1] + top, levels[i + 2] + top, levels[i + 3] + top
        n0, n2 = lengths[c0], lengths[c2]
        # Two pairs, joined afterwards: shorter chains of dependent steps than one code after the other.
        low, num_low = codes[c0] | codes[c1] << n0, n0 + lengths[c1]
        high, num_high = codes[c2] | codes[c3] << n2, n2 + lengths[c3]
        held |= (low | high << num_low) << filled
        filled += num_low + num_high
        words_at[byte] = held
        byte += filled >> three
        held >>= filled & ~seven
        filled &= seven
    # Back to the last whole word of 32 bits.
    at = np.int64(byte >> np.uint64(2))
    back = np.uint64(8) * (byte & three)
    if back:
        held = held << back | np.uint64(words[at]) & ((np.uint64(1) << back) - np.uint64(1))
        filled += back
    for i in range(4 * num_fours, levels.size):
        code = levels[i] + top
        held |= codes[code] << filled
        filled += lengths[code]
        if filled >= np.uint64(32):
            words[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
            held >>= np.uint64(32)
            filled -= np.uint64(32)
            at += 1
    if filled:
        words[at] = np.uint32(held)
    return 32 * at + np.int64(filled)


@jit
def _decode(
    packed: Any, top: int, fast: bool, words_at: Any, counts: Any, used: Any, largest: Any, rows: Any, out: Any
) -> int:
    """0, or the number of the fault."""
    bit, first, most = np.int64(0), np.int64(0), np.int64(0)
    if fast:
        mask = np.uint64((1 << _WINDOW) - 1)
        last = np.int64(8 * packed.size - 64)
        room = np.int64(out.size - _WINDOW)
        while bit <= last and first <= room:
            word = words_at[bit >> 3] >> np.uint64(bit & 7)
            window = word & mask
            count = counts[window]
            if count:
                for j in range(_WINDOW):
                    out[first + j] = rows[window, j]
                most = max(most, largest[window])
                first += count
                bit += used[window]
                continue
            z = np.int64(0)
            while z < 16 and (word >> np.uint64(z)) & np.uint64(1) == np.uint64(0):
                z += 1
            if z > 15:
                return 2
            low = (word >> np.uint64(z + 1)) & ((np.uint64(1) << np.uint64(z)) - np.uint64(1))
            level = (np.int64(1) << z) + np.int64(low) - 1
            if level > top:
                return 2
            out[first] = -level if (word >> np.uint64(2 * z + 1)) & np.uint64(1) else level
            first += 1
            bit += 2 * z + 2
    if most > top:
        return 2
    return _decode_rest(packed, top, bit, first, out)  # type: ignore[no-any-return]


@jit
def _decode_rest(packed: Any, top: int, bit: int, first: int, out: Any) -> int:
    held, filled, at = np.uint64(0), 0, bit >> 3
    if bit & 7:
        held = np.uint64(packed[at]) >> np.uint64(bit & 7)
        filled = 8 - (bit & 7)
        at += 1
    for i in range(first, out.size):
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
