"""The k largest magnitudes of one block: a radix selection on the bits, without sorting.

Histograms count eleven bits at a time, of fewer and fewer candidates, until few are left. What the block before came to
is where the search begins: neighbouring blocks are alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.numba.jit import jit, wide_vectors

_BINS = 1 << 11  # of a histogram: eleven bits of the magnitudes at a time
_FEW = 64  # so many are compared with each other: quicker than another histogram


def room_to_select(size: int, dtype: Any) -> tuple[Any, ...]:
    """Memory to work in: a block's values, its magnitudes' bits, a histogram, candidates and marks of them."""
    bits = np.empty((3, size), np.int32 if np.dtype(dtype).itemsize == 4 else np.int64)
    marks = np.empty(-(-size // 8) * 8, np.uint8)
    return np.empty(size, dtype), bits, np.empty(_BINS, np.int32), np.empty(size, np.int32), marks


@jit
def select_largest(
    held: Any,
    bits: Any,
    size: int,
    wanted: int,
    least: Any,
    histogram: Any,
    found: Any,
    flags: Any,
    places: Any,
    sent: Any,
) -> tuple[Any, Any]:
    """Selects from one block; returns how many it selected, and a magnitude that all of them reach.

    Args:
        held: the block's values.
        bits: of their magnitudes, in its first row.
        size: how many there are.
        wanted: how many to select.
        least: the magnitude that it returned of the block before.
        histogram, found, flags: memory to work in.
        places, sent: to fill from the beginning; one more may be written.
    """
    floor = _floor(bits[0, :size], wanted, least)
    num_candidates = _candidates(bits[0, :size], floor, flags, flags.view(np.uint64), found, bits[1])
    least, ties = _threshold(bits[1, :num_candidates], wanted, histogram, bits[2])
    count = 0
    for i in range(num_candidates):
        place, magnitude = found[i], bits[1, i]
        places[count] = place
        sent[count] = held[place]
        equal = magnitude == least and ties > 0
        ties -= equal
        count += (magnitude > least) | equal
    return count, least


@jit
def _floor(bits: Any, wanted: int, last: Any) -> Any:
    """A magnitude that `wanted` or more reach, a few more where this block is like the last; 1 where too few do."""
    step = 1 << (19 if bits.itemsize == 4 else 48)  # a sixteenth of an octave: another count is quick, a candidate not
    floor = np.int64(last) - step
    while floor > 1 and _count_from(bits, bits.dtype.type(floor)) < wanted:
        step *= 2
        floor -= step
    return bits.dtype.type(max(floor, 1))


@jit
def _count_from(bits: Any, floor: Any) -> Any:
    wide_vectors()
    count = np.int32(0)
    for i in range(bits.size):
        count = np.int32(count + np.int32(bits[i] >= floor))
    return count


@jit
def _candidates(bits: Any, floor: Any, flags: Any, words: Any, found: Any, magnitudes: Any) -> int:
    """The places and magnitudes that reach the floor; returns how many there are."""
    _flag(bits, floor, flags)
    count = 0
    for i in range((bits.size + 7) // 8):
        if words[i]:
            for place in range(8 * i, 8 * i + 8):
                if flags[place]:
                    found[count] = place
                    magnitudes[count] = bits[place]
                    count += 1
    return count


@jit
def _flag(bits: Any, floor: Any, flags: Any) -> None:
    wide_vectors()
    for i in range(bits.size):
        flags[i] = np.uint8(bits[i] >= floor)
    flags[bits.size : (bits.size + 7) // 8 * 8] = 0


@jit
def _threshold(bits: Any, wanted: int, histogram: Any, room: Any) -> tuple[Any, int]:
    """Returns (least, ties): the largest are those above `least`, and the first `ties` of those equal to it."""
    if bits.size <= wanted:
        return bits.dtype.type(0), 0
    candidates, size = bits, bits.size
    shift = 8 * bits.itemsize - 12
    while size > _FEW:
        histogram[:] = 0
        place = 0
        for i in range(size):
            each = (candidates[i] >> shift) & (_BINS - 1)
            histogram[each] += 1
            place = max(place, each)
        while histogram[place] < wanted:
            wanted -= histogram[place]
            place -= 1
        found = 0
        for i in range(size):
            magnitude = candidates[i]
            room[found] = magnitude
            found += ((magnitude >> shift) & (_BINS - 1)) == place
        candidates, size = room, found
        lowest = (room[0] >> shift) << shift
        if size == wanted:  # all of them, down to the lowest of this bin
            return bits.dtype.type(lowest - 1), 0
        if shift == 0:
            return bits.dtype.type(lowest), wanted
        shift = max(shift - 11, 0)
    least, ties = _of_few(candidates[:size], wanted)
    return least, ties


@jit
def _of_few(bits: Any, wanted: int) -> tuple[Any, int]:
    """`_threshold` of a few numbers: for each, how many are above it, and how many equal."""
    for i in range(bits.size):
        above = _count_from(bits, bits[i] + 1)
        if above < wanted <= _count_from(bits, bits[i]):
            return bits[i], wanted - above
    return bits.dtype.type(0), 0
