"""Worked vectors of the 3LC arithmetic (3LC, sections 3.1-3.3), asked of the oracle and of the compiled kernels."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.kernels import oracle

from thinwire.kernels.numba import Workspace, decode_ternary, encode_ternary
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.zero_run import zero_run_decode, zero_run_encode

LAYOUTS = ("stride", "partition")
T = [0.30, -0.10, 0.0, -0.40, 0.15, 0.05, 0.02, 0.0, -0.01, 0.22, 0.0, -0.21]

NUMBA = SimpleNamespace(
    encode_ternary=partial(encode_ternary, workspace=Workspace()),
    decode_ternary=partial(decode_ternary, workspace=Workspace()),
    zero_run_encode=partial(zero_run_encode, workspace=Workspace()),
    zero_run_decode=partial(zero_run_decode, workspace=Workspace()),
)
both = pytest.mark.parametrize("impl", [oracle, NUMBA], ids=["oracle", "numba"])


@both
def test_place_values(impl: Any) -> None:
    for trits, code in (
        ([0, 0, 0, 0, 0], 121),
        ([1, 1, 1, 1, 1], 242),
        ([-1, -1, -1, -1, -1], 0),
        ([1, 0, 0, 0, 0], 202),
        ([0, 0, 0, 0, 1], 122),
        ([-1, 0, 0, 0, 0], 40),
        ([0, 0, 0, 0, -1], 120),
    ):
        for layout in LAYOUTS:
            values = np.array(trits, np.float32)
            _, packed = impl.encode_ternary(values, sparsity=1.0, layout=layout, zero_run=False)
            assert packed.tolist() == [code], (trits, layout)


@both
def test_all_243_groups_round_trip(impl: Any) -> None:
    codes = np.arange(243, dtype=np.uint8)
    for layout in LAYOUTS:
        trits = np.empty(1215, np.float32)
        impl.decode_ternary(codes, scale=1.0, out=trits, layout=layout, zero_run=False)
        assert set(trits.tolist()) == {-1, 0, 1}, layout
        _, packed = impl.encode_ternary(trits, sparsity=1.0, layout=layout, zero_run=False)
        assert packed.tolist() == codes.tolist(), layout


@both
def test_runs_of_zero_codes(impl: Any) -> None:
    for run, encoded in (
        (1, [121]),
        (2, [243]),
        (3, [244]),
        (13, [254]),
        (14, [255]),
        (15, [255, 121]),
        (16, [255, 243]),
        (28, [255, 255]),
        (29, [255, 255, 121]),
        (43, [255, 255, 255, 121]),
    ):
        codes = np.full(run, 121, dtype=np.uint8)
        assert impl.zero_run_encode(codes).tolist() == encoded, run
        assert impl.zero_run_decode(frozen(np.array(encoded, np.uint8)), run).tolist() == codes.tolist(), run


@both
def test_runs_between_other_codes(impl: Any) -> None:
    for codes, encoded in (
        ([5, *[121] * 39, 7], [5, 255, 255, 252, 7]),
        ([9, 121, 121, 9], [9, 243, 9]),
        ([121] * 6, [247]),
        ([], []),
        ([0, 242, 120, 122], [0, 242, 120, 122]),
    ):
        assert impl.zero_run_encode(np.array(codes, np.uint8)).tolist() == encoded, codes


@both
def test_pipeline_of_twelve_values(impl: Any) -> None:
    for sparsity, pad0, zero_run, layout, payload in (
        (1.0, False, False, "partition", [178, 121, 118]),
        (1.0, True, False, "partition", [177, 120, 117]),
        (1.0, False, False, "stride", [199, 122, 94]),
        (1.0, False, True, "partition", [178, 121, 118]),
        (1.0, True, True, "partition", [177, 120, 117]),
        (1.5, False, False, "partition", [94, 121, 121]),
        (1.5, False, False, "stride", [118, 121, 121]),
        (1.5, False, True, "partition", [94, 243]),
        (1.5, True, True, "partition", [93, 120, 120]),
        (1.9, False, False, "stride", [118, 121, 121]),
        (1.9, False, True, "partition", [94, 243]),
        (1.9, True, True, "partition", [93, 120, 120]),
    ):
        case = f"s={sparsity}, {layout}, digit {0 if pad0 else 1} as padding, zero runs: {zero_run}"
        t, residual = np.array(T, dtype=np.float32), np.zeros(12, dtype=np.float32)
        form: dict[str, Any] = {"layout": layout, "zero_run": zero_run}
        m, encoded = impl.encode_ternary(t, sparsity=sparsity, paper_literal=pad0, residual=residual, **form)
        assert m == np.float32(0.4) * np.float32(sparsity), case
        assert encoded.tolist() == payload, case
        expected = np.array(T)
        expected[3] += m
        if sparsity == 1.0:
            expected[[0, 9]] -= m
            expected[11] += m
        np.testing.assert_allclose(residual, expected, atol=1e-7, err_msg=case)
        # The padding is cut off, so the decoder need not know which digit filled it.
        out = np.empty(12, dtype=np.float32)
        impl.decode_ternary(encoded, scale=m, out=out, **form)
        np.testing.assert_array_equal(out + residual, t, err_msg=case)


@both
def test_three_steps_with_error_accumulation(impl: Any) -> None:
    steps = [
        ([0.4, 0.1, -0.2, 0, 0.3, -0.4], 0.7, [202, 112], [-0.3, 0.1, -0.2, 0, 0.3, 0.3]),
        ([0.1, 0.1, -0.2, 0, 0.3, 0.1], 1.05, [130, 121], [-0.2, 0.2, -0.4, 0, -0.45, 0.4]),
        ([0, 0.1, 0, 0, 0, 0], 0.7875, [85, 130], [-0.2, 0.3, 0.3875, 0, 0.3375, -0.3875]),
    ]
    residual = np.zeros(6, dtype=np.float32)
    for values, scale, wire, left in steps:
        given = np.array(values, dtype=np.float32)
        m, payload = impl.encode_ternary(given, sparsity=1.75, layout="partition", residual=residual)
        assert m == pytest.approx(scale, rel=1e-6)
        assert payload.tolist() == wire
        np.testing.assert_allclose(residual, left, atol=1e-6)


@both
def test_size_of_all_zero_tensors(impl: Any) -> None:
    for size, pad1, pad0 in (
        (0, 0, 0),
        (1, 1, 1),
        (5, 1, 1),
        (6, 1, 2),
        (9, 1, 2),
        (10, 1, 1),
        (70, 1, 1),
        (71, 2, 5),
        (74, 2, 2),
        (75, 2, 2),
        (140, 2, 2),
        (141, 3, 6),
        (1000, 15, 15),
        (1001, 15, 19),
        (1_000_000, 14286, 14286),
    ):
        zeros = np.zeros(size, dtype=np.float32)
        for literal, expected in ((False, pad1), (True, pad0)):
            m, payload = impl.encode_ternary(zeros, sparsity=1.0, layout="partition", paper_literal=literal)
            assert (m, payload.size) == (0.0, expected), (size, literal)


@both
def test_literal_padding_breaks_the_last_run(impl: Any) -> None:
    zeros, options = np.zeros(71, dtype=np.float32), {"sparsity": 1.0, "layout": "partition"}
    _, payload = impl.encode_ternary(zeros, paper_literal=True, **options)
    assert payload.tolist() == [252, 120, 120, 120, 120]
    _, payload = impl.encode_ternary(zeros, **options)
    assert payload.tolist() == [255, 121]


@both
def test_a_tie_is_zero(impl: Any) -> None:
    for dtype in (np.float32, np.float64):
        values = np.array([1.0, 0.5, -0.5, 0.4999999, 0.5000001], dtype=dtype)
        out = np.empty(5, dtype=dtype)
        m, payload = impl.encode_ternary(values, sparsity=1.0)
        impl.decode_ternary(payload, scale=m, out=out)
        assert out.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0], dtype


@both
def test_sparsity_close_to_two(impl: Any) -> None:
    below = float(np.nextafter(np.float32(2), np.float32(0)))
    for sparsity, sent in ((1.9, 1), (1.999, 1), (1.9999999, 1), (below, 1), (2 - 2**-30, 0)):
        values, out = np.array([1.0, -0.3], dtype=np.float32), np.empty(2, dtype=np.float32)
        m, payload = impl.encode_ternary(values, sparsity=sparsity)
        impl.decode_ternary(payload, scale=m, out=out)
        assert (out.tolist(), m) == ([sent * m, 0.0], float(np.float32(sparsity))), sparsity


def test_the_random_numbers_are_uniform_and_independent_of_place() -> None:
    key = (0x12345678, 0xFFFFFFF0)
    draws = oracle.draws(key, 200_000)
    assert np.array_equal(oracle.draws(key, 1000, first=5000), draws[5000:6000])
    counts = np.bincount(draws >> 24, minlength=256)
    chi_squared = float(((counts - 781.25) ** 2 / 781.25).sum())
    assert 160 < chi_squared < 370  # 255 degrees of freedom: mean 255, deviation 22.6
    u = draws / 2.0**32
    for lag in (1, 2, 5, 1024):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / np.sqrt(u.size), lag
    for other in ((key[0] + 1, key[1]), (key[0], key[1] ^ 1), (key[1], key[0])):
        assert abs(np.corrcoef(u, oracle.draws(other, u.size) / 2.0**32)[0, 1]) < 5 / np.sqrt(u.size), other


def test_draws_never_change() -> None:
    """Frames of `randomk` hold the key instead of positions: these numbers are part of the wire format."""
    assert oracle.draws((1, 2), 4).tolist() == [4145324735, 4161103663, 2412645041, 1675560945]


G = np.array([0.4, -0.1, 0, -0.8, 0.2, 0.6])
U = np.array([0.3, 0.2, 0, 0.999, 0.25, 0.7])


def test_terngrad_of_the_worked_example() -> None:
    t = oracle.ternarise(G, scale=0.8, limit=0.8, uniforms=U)
    assert t.tolist() == [1, 0, 0, -1, 0, 1]
    assert oracle.pack_trits(t, "2bit").tolist() == [22, 89]
    assert oracle.pack_base243(t, layout="partition").tolist() == [202, 103]


def test_terngrad_of_two_workers_that_share_a_scale() -> None:
    first = oracle.ternarise(G, scale=0.8, limit=0.8, uniforms=U)
    g, u = np.array([-0.2, 0.3, 0.1, -0.5, 0, 0.4]), np.array([0.1, 0.5, 0.1, 0.6, 0.5, 0.45])
    second = oracle.ternarise(g, scale=0.8, limit=0.5, uniforms=u)
    assert second.tolist() == [-1, 0, 1, -1, 0, 1]
    votes = first + second
    assert votes.tolist() == [0, 0, 1, -2, 0, 2]
    average = oracle.scale_integers(votes, scale=0.8, top=2, dtype=np.float64)
    assert average.tolist() == pytest.approx([0, 0, 0.4, -0.8, 0, 0.8])
