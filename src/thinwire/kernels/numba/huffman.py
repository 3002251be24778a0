"""Symbols 0 … 2**N − 1, N ≤ 13, as canonical Huffman codes in four streams.

Code lengths are optimal under a limit (package-merge), so that a decoder's table fits the cache. Codes follow from the
lengths, shortest first and then by symbol, so a payload holds only lengths. NumPy computes them, once for a tensor.

In a stream a code's first bit comes first; bit 0 of the stream is the lowest bit of the first byte.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.jit import frozen, jit, words_apart

MAX_BITS = 13
_REPEAT = 16
"""In the written form of lengths, byte _REPEAT + r repeats the length before it r times."""
NUM_STREAMS = 4
_SLACK = 16
_SHIFT = 6
"""Table entries have a length in their low 6 bits."""
_3, _6, _7, _63 = np.uint64(3), np.uint64(_SHIFT), np.uint64(7), np.uint64(63)


def length_limit(num_bits: int) -> int:
    """Returns the longest code of 2**num_bits symbols: four must fit a 64-bit word beside seven other bits.

    Example:
        >>> length_limit(10), length_limit(13)
        (12, 14)
    """
    return 12 if num_bits <= 10 else 14


def code_lengths(counts: NDArray[np.int64], limit: int) -> NDArray[np.uint8]:
    """Returns optimal code lengths of at most `limit` bits; 0 for symbols of count 0. Two or more counts are positive.

    Example:
        >>> code_lengths(np.array([5, 2, 1, 1]), 12).tolist()
        [1, 2, 3, 3]
    """
    used = np.flatnonzero(counts)
    order = used[np.argsort(counts[used], kind="stable")]
    weights = counts[order]
    # Package-merge: at every level, the leaves and the pairs of the level below, by weight.
    levels, packages = [], np.empty(0, np.int64)
    for _ in range(limit):
        merged = np.concatenate((weights, packages))
        by_weight = np.argsort(merged, kind="stable")
        levels.append(by_weight < weights.size)
        pairs = merged[by_weight][: merged.size // 2 * 2]
        packages = pairs[::2] + pairs[1::2]
    sorted_lengths = np.zeros(weights.size, np.uint8)
    take = 2 * weights.size - 2
    for is_leaf in reversed(levels):
        leaves = int(np.count_nonzero(is_leaf[:take]))
        sorted_lengths[:leaves] += 1
        take = 2 * (take - leaves)
    lengths = np.zeros(counts.size, np.uint8)
    lengths[order] = sorted_lengths
    return lengths


def canonical_codes(lengths: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns the codes as numbers; the highest bit is sent first.

    Example:
        >>> canonical_codes(np.array([1, 2, 3, 3], np.uint8)).tolist()
        [0, 2, 6, 7]
    """
    codes = np.zeros(lengths.size, np.int64)
    order = np.lexsort((np.arange(lengths.size), lengths))
    order = order[lengths[order] > 0]
    sorted_lengths = lengths[order].astype(np.int64)
    longest = int(sorted_lengths[-1])
    starts = np.concatenate(([0], np.cumsum(1 << (longest - sorted_lengths))[:-1]))
    codes[order] = starts >> (longest - sorted_lengths)
    return codes


def write_lengths(lengths: NDArray[np.uint8]) -> bytes:
    """Returns the lengths with runs shortened: a length is one byte, and bytes above 16 repeat it.

    Example:
        >>> write_lengths(np.array([0, 0, 0, 5, 5], np.uint8)).hex()
        '00120511'
    """
    edges = np.flatnonzero(np.diff(lengths)) + 1
    starts = np.concatenate(([0], edges))
    written = bytearray()
    for length, run in zip(lengths[starts].tolist(), np.diff(np.append(starts, lengths.size)).tolist(), strict=True):
        written.append(length)
        run -= 1
        while run:
            piece = min(run, 255 - _REPEAT)
            written.append(_REPEAT + piece)
            run -= piece
    return bytes(written)


def read_lengths(data: memoryview, num_symbols: int, limit: int) -> tuple[NDArray[np.uint8], int]:
    """Returns the lengths, and the offset behind them.

    Raises:
        FrameError: they do not end after `num_symbols`, or are no complete code of at most `limit` bits.
    """
    lengths = np.zeros(num_symbols, np.uint8)
    known = at = 0
    while known < num_symbols:
        if at >= len(data) or (data[at] > _REPEAT and at == 0):
            raise FrameError("the code lengths end too early, or begin with a repetition")
        byte = data[at]
        run = 1 if byte <= _REPEAT else byte - _REPEAT
        if run > num_symbols - known or (byte <= _REPEAT and byte > limit):
            raise FrameError(f"the code lengths are more than {num_symbols}, or longer than {limit} bits")
        lengths[known : known + run] = byte if byte <= _REPEAT else lengths[known - 1]
        known, at = known + run, at + 1
    used = lengths[lengths > 0].astype(np.int64)
    if used.size < 2 or int((1 << (limit - used)).sum()) != 1 << limit:
        raise FrameError("the code lengths are not those of a complete code")
    return lengths, at


def reversed_codes(lengths: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns the canonical codes with their bits reversed: the bit sent first is the lowest."""
    codes = canonical_codes(lengths)
    flipped = np.zeros_like(codes)
    for place in range(int(lengths.max())):
        flipped = flipped << 1 | codes >> place & 1
    return flipped >> (int(lengths.max()) - lengths.astype(np.int64))


def stream_edges(size: int) -> list[int]:
    """Returns the offsets of the four streams in `size` symbols, and the end."""
    quarter = -(-size // NUM_STREAMS)
    return [min(i * quarter, size) for i in range(NUM_STREAMS + 1)]


def encode_symbols(symbols: NDArray[np.uint16], lengths: NDArray[np.uint8], *, room: Bytes) -> list[Bytes]:
    """Encodes the four streams into quarters of `room`, which has `room_nbytes` bytes; returns views of it."""
    table = (reversed_codes(lengths) << _SHIFT | lengths).astype(np.uint64)
    given, words, part = frozen(symbols), words_apart(room, 1), room.size // NUM_STREAMS
    streams = []
    for at, (start, stop) in enumerate(itertools.pairwise(stream_edges(symbols.size))):
        num_bits = _encode(given[start:stop], table, words[at * part :])
        streams.append(room[at * part : at * part + -(-num_bits // 8)])
    return streams


def room_nbytes(size: int, limit: int) -> int:
    """Returns the bytes of `room` for `size` symbols."""
    return NUM_STREAMS * (-(-stream_edges(size)[1] * limit // 8) + _SLACK)


def decode_symbols(
    streams: list[memoryview], lengths: NDArray[np.uint8], limit: int, *, room: Bytes, out: NDArray[np.uint16]
) -> None:
    """Decodes four streams into `out`.

    Args:
        streams: of any length; nothing is read beyond them.
        lengths: of a complete code, see `read_lengths`.
        limit: the decoder's table has 2**limit entries.
        room: scratch, uint8[the streams' bytes + 4·16].
        out: uint16[n], filled.

    Raises:
        FrameError: a stream does not end where its last symbol does. The content of `out` is then undefined.
    """
    table, edges, at = _table(lengths, limit), stream_edges(out.size), 0
    words = words_apart(room, 1)
    for stream, start, stop in zip(streams, edges, edges[1:], strict=False):
        room[at : at + len(stream)] = np.frombuffer(stream, np.uint8)
        room[at + len(stream) : at + len(stream) + _SLACK] = 0
        end = int(_decode(words[at:], len(stream) + _SLACK - 8, table, limit, out[start:stop]))
        if -(-end // 8) != len(stream) or (end % 8 and stream[-1] >> end % 8):
            raise FrameError(f"a stream of {len(stream)} bytes ends at bit {end}: the payload is damaged")
        at += len(stream) + _SLACK


def _table(lengths: NDArray[np.uint8], limit: int) -> NDArray[np.uint64]:
    """Returns for every word of `limit` bits the symbol of its first code, and in the low 6 bits the code's length."""
    table = np.zeros(1 << limit, np.uint64)
    codes = reversed_codes(lengths)
    for length in range(1, limit + 1):
        symbols = np.flatnonzero(lengths == length)
        words = codes[symbols][:, None] | np.arange(1 << (limit - length))[None, :] << length
        table[words] = (symbols[:, None] << _SHIFT | length).astype(np.uint64)
    return table


@jit
def _encode(symbols: Any, table: Any, words: Any) -> Any:
    """Returns the number of bits of the codes."""
    held, filled, at = np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(symbols.size):
        entry = table[symbols[i]]
        held |= (entry >> _6) << filled
        filled += entry & _63
        words[at] = held
        at += filled >> _3
        held >>= filled & ~_7
        filled &= _7
    return np.int64(at << _3) + np.int64(filled)


@jit
def _decode(words: Any, last: int, table: Any, limit: int, out: Any) -> Any:
    """Returns the bit behind the last code. No word behind `last` is read."""
    mask, most, position = np.uint64((1 << limit) - 1), np.uint64(last), np.uint64(0)
    for i in range(out.size):
        entry = table[(words[min(position >> _3, most)] >> (position & _7)) & mask]
        out[i] = entry >> _6
        position += entry & _63
    return np.int64(position)
