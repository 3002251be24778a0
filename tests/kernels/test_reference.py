"""The reference against the worked vectors of the 3LC arithmetic (3LC, sections 3.1-3.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from thinwire.kernels import numba as kernels
from thinwire.kernels import reference
from thinwire.kernels.numba import Workspace

T = [0.30, -0.10, 0.0, -0.40, 0.15, 0.05, 0.02, 0.0, -0.01, 0.22, 0.0, -0.21]

# Every vector is asked of the reference and of the compiled kernels alike.
both = pytest.mark.parametrize("impl", [reference, kernels], ids=["reference", "numba"])


def uint8(*codes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array(codes, dtype=np.uint8)


@both
@pytest.mark.parametrize(
    ("trits", "code"),
    [
        ([0, 0, 0, 0, 0], 121),
        ([1, 1, 1, 1, 1], 242),
        ([-1, -1, -1, -1, -1], 0),
        ([1, 0, 0, 0, 0], 202),
        ([0, 0, 0, 0, 1], 122),
        ([-1, 0, 0, 0, 0], 40),
        ([0, 0, 0, 0, -1], 120),
    ],
)
@pytest.mark.parametrize("layout", ["stride", "partition"])
def test_place_values(impl: Any, trits: list[int], code: int, layout: str) -> None:
    packed = impl.pack_base243(np.array(trits, dtype=np.int8), layout=layout, workspace=Workspace())
    assert packed.tolist() == [code]


@both
def test_all_243_groups_round_trip(impl: Any) -> None:
    codes = np.arange(243, dtype=np.uint8)
    for layout in ("stride", "partition"):
        trits = np.empty(1215, dtype=np.int8)
        impl.unpack_base243(codes, out=trits, layout=layout, workspace=Workspace())
        assert set(trits.tolist()) == {-1, 0, 1}
        assert impl.pack_base243(trits, layout=layout, workspace=Workspace()).tolist() == codes.tolist()


@both
@pytest.mark.parametrize(
    ("run", "encoded"),
    [
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
    ],
)
def test_runs_of_zero_codes(impl: Any, run: int, encoded: list[int]) -> None:
    workspace = Workspace()
    codes = np.full(run, 121, dtype=np.uint8)
    assert impl.zero_run_encode(codes, workspace=workspace).tolist() == encoded
    assert impl.zero_run_decode(bytes(encoded), run, workspace=workspace).tolist() == codes.tolist()


@both
@pytest.mark.parametrize(
    ("codes", "encoded"),
    [
        ([5, *[121] * 39, 7], [5, 255, 255, 252, 7]),
        ([9, 121, 121, 9], [9, 243, 9]),
        ([121] * 6, [247]),
        ([], []),
        ([0, 242, 120, 122], [0, 242, 120, 122]),
    ],
)
def test_runs_between_other_codes(impl: Any, codes: list[int], encoded: list[int]) -> None:
    assert impl.zero_run_encode(uint8(*codes), workspace=Workspace()).tolist() == encoded


@both
@pytest.mark.parametrize(
    ("sparsity", "pad0", "zero_run", "layout", "payload"),
    [
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
    ],
)
def test_pipeline_of_twelve_values(
    impl: Any, sparsity: float, pad0: bool, zero_run: bool, layout: str, payload: list[int]
) -> None:
    t = np.array(T, dtype=np.float32)
    residual = np.zeros(12, dtype=np.float32)
    m, encoded = impl.encode_ternary(
        t,
        sparsity=sparsity,
        layout=layout,
        zero_run=zero_run,
        paper_literal=pad0,
        residual=residual,
        workspace=Workspace(),
    )
    assert m == np.float32(0.4) * np.float32(sparsity)
    assert encoded.tolist() == payload
    expected = np.array(T)
    expected[3] += m
    if sparsity == 1.0:
        expected[[0, 9]] -= m
        expected[11] += m
    np.testing.assert_allclose(residual, expected, atol=1e-7)
    # The padding is cut off, so the decoder need not know which digit filled it.
    out = np.empty(12, dtype=np.float32)
    impl.decode_ternary(encoded, scale=m, out=out, layout=layout, zero_run=zero_run, workspace=Workspace())
    np.testing.assert_array_equal(out + residual, t)


@both
def test_three_steps_with_error_accumulation(impl: Any) -> None:
    steps = [
        ([0.4, 0.1, -0.2, 0, 0.3, -0.4], 0.7, [202, 112], [-0.3, 0.1, -0.2, 0, 0.3, 0.3]),
        ([0.1, 0.1, -0.2, 0, 0.3, 0.1], 1.05, [130, 121], [-0.2, 0.2, -0.4, 0, -0.45, 0.4]),
        ([0, 0.1, 0, 0, 0, 0], 0.7875, [85, 130], [-0.2, 0.3, 0.3875, 0, 0.3375, -0.3875]),
    ]
    workspace, residual = Workspace(), np.zeros(6, dtype=np.float32)
    for values, scale, wire, left in steps:
        m, payload = impl.encode_ternary(
            np.array(values, dtype=np.float32),
            sparsity=1.75,
            layout="partition",
            residual=residual,
            workspace=workspace,
        )
        assert m == pytest.approx(scale, rel=1e-6)
        assert payload.tolist() == wire
        np.testing.assert_allclose(residual, left, atol=1e-6)


@both
@pytest.mark.parametrize(
    ("size", "pad1", "pad0"),
    [
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
    ],
)
def test_size_of_all_zero_tensors(impl: Any, size: int, pad1: int, pad0: int) -> None:
    zeros = np.zeros(size, dtype=np.float32)
    for literal, expected in ((False, pad1), (True, pad0)):
        m, payload = impl.encode_ternary(
            zeros, sparsity=1.0, layout="partition", paper_literal=literal, workspace=Workspace()
        )
        assert (m, payload.size) == (0.0, expected)


@both
def test_literal_padding_breaks_the_last_run(impl: Any) -> None:
    zeros, options = np.zeros(71, dtype=np.float32), {"sparsity": 1.0, "layout": "partition"}
    _, payload = impl.encode_ternary(zeros, paper_literal=True, workspace=Workspace(), **options)
    assert payload.tolist() == [252, 120, 120, 120, 120]
    _, payload = impl.encode_ternary(zeros, workspace=Workspace(), **options)
    assert payload.tolist() == [255, 121]


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tie_is_zero(impl: Any, dtype: Any) -> None:
    values = np.array([1.0, 0.5, -0.5, 0.4999999, 0.5000001], dtype=dtype)
    out = np.empty(5, dtype=dtype)
    m, payload = impl.encode_ternary(values, sparsity=1.0, workspace=Workspace())
    impl.decode_ternary(payload, scale=m, out=out, workspace=Workspace())
    assert out.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


@both
@pytest.mark.parametrize(
    ("sparsity", "sent"),
    [(1.9, 1), (1.999, 1), (1.9999999, 1), (float(np.nextafter(np.float32(2), np.float32(0))), 1), (2 - 2**-30, 0)],
)
def test_sparsity_close_to_two(impl: Any, sparsity: float, sent: int) -> None:
    values = np.array([1.0, -0.3], dtype=np.float32)
    out = np.empty(2, dtype=np.float32)
    m, payload = impl.encode_ternary(values, sparsity=sparsity, workspace=Workspace())
    impl.decode_ternary(payload, scale=m, out=out, workspace=Workspace())
    assert out.tolist() == [sent * m, 0.0]
    assert m == float(np.float32(sparsity))
