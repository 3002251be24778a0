"""Values kept by chance, the choice of the oracle, inside the room that is given; values taken out by magnitude."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from lab.tests.kernels import oracle
from tests.kernels.oracle import with_residual
from thinwire_lab.kernels.thinning import collect_kept, kept_positions, take

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


def heavy(size: int, dtype: Any) -> Any:
    return np.random.default_rng(size).standard_t(2, size).astype(dtype)


def test_taking_out_what_reaches_a_bound() -> None:
    for dtype, size, bound in product(DTYPES, (1, 7, 8, 9, 8191, 8192, 8193, 140_001), (1e-3, 1.5, 40.0)):
        values, held = heavy(size, dtype), heavy(size + 1, dtype)[:-1]
        for residual in (None, held):
            for tau in (None, 0.7):
                v = with_residual(values, residual, 0.3)
                reaches = np.abs(v) >= dtype(bound)
                left = None if residual is None else residual.copy()
                bitmap = np.full(-(-size // 8), 255, np.uint8)
                options: dict[str, Any] = {"residual": left, "residual_scale": 0.3, "tau": tau, "bitmap": bitmap}
                taken = take(values, bound, room=np.empty(size + 1, dtype), **options)
                assert taken.tobytes() == v[reaches].tobytes(), (dtype, size, bound)
                assert np.array_equal(bitmap, np.packbits(reaches)), (dtype, size, bound)
                if left is not None:
                    rest = np.zeros_like(v) if tau is None else v - np.copysign(dtype(tau), v)
                    assert left.tobytes() == np.where(reaches, rest, v).tobytes(), (dtype, size, bound)
