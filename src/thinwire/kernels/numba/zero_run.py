"""Zero-run encoding (3LC, section 3.3): runs of the code 121 become one byte. Codes in, payload out, and back.

A loop over bytes that tests each for zero mispredicts at almost every run. Eight codes are therefore handled at once,
as bytes of a 64-bit word, with arithmetic that compilers turn into vector code on any machine: flag the zeros, count
each zero's position in its run by doubling, find the bytes that an encoder would write, and move these to the low end
of the word. Only two short loops go word by word: the length of the run that reaches into each word, and the
store of each word behind the previous one.

The lowest byte of a word is the first code: Numba runs only on little-endian machines.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.contract import FIRST_RUN, LONGEST_RUN, ZERO_CODE, Bytes
from thinwire.kernels.numba.jit import jit, wide_vectors

_ONES = np.uint64(0x0101010101010101)
_LOW7 = np.uint64(0x7F7F7F7F7F7F7F7F)
_ZERO_CODES = np.uint64(0x7979797979797979)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_LOW_BYTE = np.uint64(0xFF)
_0, _1, _2, _6, _7, _8, _13, _14, _16, _32, _56, _121 = (
    np.uint64(i) for i in (0, 1, 2, 6, 7, 8, 13, 14, 16, 32, 56, ZERO_CODE)
)
_ABOVE_14 = np.uint64(0x7171717171717171)  # 113 + count carries into bit 7 from 15 on
_FROM_2 = np.uint64(0x7E7E7E7E7E7E7E7E)  # 126 + count carries into bit 7 from 2 on
_FROM_14 = np.uint64(0x7272727272727272)  # 114 + count carries into bit 7 from 14 on
_RUN_BASE = np.uint64(0xF1F1F1F1F1F1F1F1)  # 241: a run of k is 241 + k

# For each byte of payload, the number of codes it expands to, and the first eight (after a literal: undefined).
_COUNTS = np.array([1] * FIRST_RUN + list(range(2, LONGEST_RUN + 1)), dtype=np.uint8)
_FIRST_WORD = np.array([0x7979797979797900 + (b if b < FIRST_RUN else ZERO_CODE) for b in range(256)], dtype=np.uint64)


def num_expanded(payload: Bytes) -> int:
    """Returns the number of codes of a read-only payload, or of a part of one: any cut is legal.

    Example:
        >>> num_expanded(np.array([5, 244, 7], np.uint8))
        5
    """
    return int(count_expanded(payload))


@jit
def encode_runs(words: Any, size: int, words_at: Any, scratch: Any) -> Any:
    """Encodes `size` codes into the bytes behind `words_at`; both may be the same memory. Returns the end.

    A run of k zero codes, 2 <= k <= 14, becomes the byte 243 + (k - 2). Longer runs are cut greedily into fourteens,
    remainder last: canonical and shortest.

    `words` has a word behind the last code. Writing never overtakes reading: the output is no longer than the input.
    """
    num_words = (size + 7) // 8
    # Codes other than zero behind the end stop the last run; each leaves one byte, which is cut off again.
    padding = 8 * num_words - size
    if padding:
        words[num_words - 1] &= _ALL >> np.uint64(8 * padding)
    words[num_words] = _0
    counts, carries, flags = scratch[0], scratch[1], scratch[2]
    block = counts.size - 1
    end: Any = 0
    carried = _0
    for start in range(0, num_words, block):
        length = min(block, num_words - start)
        _count_runs(words[start : start + length], counts, flags)
        # The run (mod 14) that reaches into each word, in each of its bytes: the only chain from word to word.
        for i in range(length):
            carries[i] = carried * _ONES
            trailing = counts[i] >> _56
            longer = carried - _6 if carried >= _6 else carried + _8
            carried = longer if trailing == _8 else trailing
        flags[length] = _1 if (words[start + length] & _LOW_BYTE) == _121 else _0
        _emit(words[start : start + length], counts, carries, flags, flags[1:])
        for i in range(length):
            words_at[end] = counts[i]
            end += np.int64(carries[i])
    return end - padding


@jit
def _count_runs(words: Any, counts: Any, flags: Any) -> None:
    """Sets for each byte a flag of 1 for a zero code, and its position (1..8) in a run that starts in this word."""
    wide_vectors()
    for i in range(words.size):
        differs = words[i] ^ _ZERO_CODES
        zero = (~(((differs & _LOW7) + _LOW7) | differs | _LOW7)) >> _7
        mask = (zero << _8) - zero
        count = zero + ((zero << _8) & mask)
        mask &= mask << _8
        count += (count << _16) & mask
        mask &= mask << _16
        count += (count << _32) & mask
        flags[i] = zero
        counts[i] = count


@jit
def _emit(words: Any, counts: Any, carries: Any, flags: Any, next_flags: Any) -> None:
    """Turns each word into its bytes to send, moved to the low end (in `counts`), and their number (in `carries`)."""
    wide_vectors()
    for i in range(words.size):
        zero = flags[i]
        mask = (zero << _8) - zero
        # Zeros below the first other code continue the carried run: only there does ~mask - 1 borrow into mask.
        count = counts[i] + (carries[i] & mask & (~mask - _1))
        count -= (((count + _ABOVE_14) >> _7) & _ONES) * _14
        full = (count + _FROM_14) >> _7
        zero_next = (zero >> _8) | (next_flags[i] << _56)
        dropped = zero & zero_next & ~full
        # A run of two or more is 241 + count. A run of one is the code 121, which is there already.
        long = ((count + _FROM_2) >> _7) & _ONES
        long = (long << _8) - long
        value = (words[i] & ~long) | ((_RUN_BASE + count) & long)
        # Compress: each kept byte moves down by the number of dropped bytes below it, bit by bit of that number.
        shift = dropped * _ONES
        num_dropped = shift >> _56
        shift <<= _8
        lost = (dropped << _8) - dropped
        value &= ~lost
        shift &= ~lost
        move = shift & _ONES
        move = (move << _8) - move
        value = (value & ~move) | ((value & move) >> _8)
        shift = (shift & ~move) | ((shift & move) >> _8)
        move = (shift >> _1) & _ONES
        move = (move << _8) - move
        value = (value & ~move) | ((value & move) >> _16)
        shift = (shift & ~move) | ((shift & move) >> _16)
        move = (shift >> _2) & _ONES
        move = (move << _8) - move
        value = (value & ~move) | ((value & move) >> _32)
        counts[i] = value
        carries[i] = _8 - num_dropped


@jit
def count_expanded(payload: Any) -> Any:
    """Returns the number of codes of a payload."""
    total = payload.size
    for byte in payload:
        total += max(np.int64(byte) - 242, 0)
    return total


@jit
def decode_runs(payload: Any, words_at: Any) -> None:
    """Expands a checked payload, with any split of a run, into the bytes behind `words_at`.

    Writes up to 16 bytes past the last code.
    """
    end: Any = 0
    for i in range(payload.size):
        byte = payload[i]
        words_at[end] = _FIRST_WORD[byte]
        words_at[end + 8] = _ZERO_CODES
        end += np.int64(_COUNTS[byte])
