"""Values kept by chance: the choice of the oracle, at any size and probability, inside the room that is given."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from lab.tests.kernels import oracle
from thinwire_lab.kernels.thinning import collect_kept, kept_positions, scatter

UNITS = 1 << 24
KEYS = [(0, 0), (1, 2), (0xFFFFFFFF, 0xDEADBEEF)]
SIZES = (1, 2, 319, 4095, 4096, 4097, 30_011)
DTYPES: tuple[Any, ...] = (np.float32, np.float64)


def test_equals_the_oracle() -> None:
    for key, size, kept, dtype in product(KEYS, SIZES, (UNITS >> 12, UNITS // 10, UNITS // 2, UNITS), DTYPES):
        case = key, size, kept, dtype
        values = np.random.default_rng(size).standard_normal(size).astype(dtype)
        wanted = oracle.kept_positions(size, key=key, kept=kept)
        sent, positions = np.empty(size + 1, dtype), np.empty(size + 1, np.int32)
        assert collect_kept(values, key=key, kept=kept, factor=dtype(3), sent=sent) == wanted.size, case
        assert np.array_equal(sent[: wanted.size], values[wanted] * dtype(3)), case
        assert kept_positions(size, key=key, kept=kept, positions=positions) == wanted.size, case
        assert np.array_equal(positions[: wanted.size], wanted), case
        out, expected = np.ones(size, dtype), np.ones(size, dtype)
        scatter(sent[: wanted.size], positions[: wanted.size], out, accumulate=True)
        expected[wanted] += sent[: wanted.size]
        assert np.array_equal(out, expected), case
        scatter(sent[: wanted.size], positions[: wanted.size], out, accumulate=False)
        assert np.array_equal(out, np.where(np.isin(np.arange(size), wanted), values * dtype(3), dtype(0))), case


def test_room_that_is_too_small_is_not_overrun() -> None:
    for key in KEYS:
        values = np.ones(5000, np.float32)
        wanted = oracle.kept_positions(5000, key=key, kept=UNITS // 2).size
        for room in (1, 2, 100):
            held = np.full(room + 8, -7.0, np.float32)
            places = np.full(room + 8, -7, np.int32)
            assert collect_kept(values, key=key, kept=UNITS // 2, factor=np.float32(1), sent=held[:room]) == wanted, key
            assert kept_positions(5000, key=key, kept=UNITS // 2, positions=places[:room]) == wanted, key
            assert (held[room:] == -7).all() and (places[room:] == -7).all(), key
