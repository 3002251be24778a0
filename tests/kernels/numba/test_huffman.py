"""Bins and Huffman codes: the numbers of Øland & Raj's worked example, optimal lengths, hostile streams."""

from __future__ import annotations

import heapq
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import oracle
from thinwire.codecs.entropy import bin_values, entropy_of
from thinwire.kernels.numba.huffman import (
    code_lengths,
    decode_symbols,
    encode_symbols,
    length_limit,
    room_nbytes,
    stream_edges,
)


def coded(symbols: Any, num_bits: int) -> tuple[Any, list[bytes]]:
    limit = length_limit(num_bits)
    lengths = code_lengths(np.bincount(symbols, minlength=1 << num_bits), limit)
    room = np.empty(room_nbytes(symbols.size, limit), np.uint8)
    return lengths, [stream.tobytes() for stream in encode_symbols(symbols, lengths, room=room)]


def decoded(streams: list[bytes], lengths: Any, num_bits: int, size: int) -> Any:
    out = np.empty(size, np.uint16)
    room = np.empty(sum(map(len, streams)) + 64, np.uint8)
    decode_symbols([memoryview(s) for s in streams], lengths, length_limit(num_bits), room=room, out=out)
    return out


def test_codes_of_the_worked_example() -> None:
    """Its bins are those of `tests/codecs/test_entropy.py`."""
    bins = np.array([0, 1, 1, 2, 2, 2, 3, 3], np.uint16)
    assert entropy_of(bins) == pytest.approx(1.905639, abs=1e-6)
    lengths = code_lengths(np.bincount(bins), 12)
    assert lengths.tolist() == [2, 2, 2, 2]
    assert oracle.bits_of_symbols(bins, lengths) == "0001011010101111"


def test_bins_of_a_range_that_overflows() -> None:
    top = np.finfo(np.float64).max
    assert bin_values(np.array([-top, 0.0, top]), low=-top, high=top, num_bits=3).tolist() == [0, 4, 7]


def huffman_cost(counts: Any) -> int:
    """Bits of an optimal code without a limit, by the textbook's heap."""
    heap = [int(count) for count in counts if count]
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heapq.heappop(heap)
        cost += pair
        heapq.heappush(heap, pair)
    return cost


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=64).filter(lambda c: sum(map(bool, c)) >= 2))
def test_lengths_are_optimal(numbers: list[int]) -> None:
    counts = np.array(numbers, np.int64)
    lengths = code_lengths(counts, 20).astype(np.int64)
    assert int((lengths * counts).sum()) == huffman_cost(counts)
    limited = code_lengths(counts, 7).astype(np.int64)
    assert limited.max() <= 7
    assert int((limited * counts).sum()) >= huffman_cost(counts)
    for found in (lengths, limited):
        used = found[found > 0]
        assert sum(2.0 ** -int(length) for length in used) == 1.0
        assert np.array_equal(found > 0, counts > 0)


def test_streams_round_trip_as_written() -> None:
    for size, num_bits in product((2, 3, 4, 5, 8, 15, 16, 17, 63, 319, 4096, 100_003), (1, 4, 10, 13)):
        rng = np.random.default_rng(size)
        top = (1 << num_bits) - 1
        symbols = np.clip(rng.laplace(top / 2, max(0.3, top / 30), size).round(), 0, top).astype(np.uint16)
        symbols[0], symbols[-1] = 0, top
        lengths, streams = coded(symbols, num_bits)
        assert np.array_equal(decoded(streams, lengths, num_bits, size), symbols), (size, num_bits)
        edges = stream_edges(size)
        if size <= 4096:
            for stream, start, stop in zip(streams, edges, edges[1:], strict=False):
                text = oracle.bits_of_symbols(symbols[start:stop], lengths)
                bits = np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little")
                assert "".join(map(str, bits))[: len(text)] == text, (size, num_bits)
                assert len(stream) == -(-len(text) // 8), (size, num_bits)
