"""The stages alone: packing trits, zero runs, the largest magnitude, and the workspace they share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.kernels import (
    Workspace,
    max_magnitude,
    pack_base243,
    reference,
    unpack_base243,
    zero_run_decode,
    zero_run_encode,
)

WORKSPACE = Workspace()


def codes_with_runs(size: int, probability: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 243, size).astype(np.uint8)
    codes[rng.random(size) < probability] = 121
    return codes


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.6, 0.9, 0.97, 0.995, 1.0])
def test_zero_runs_equal_the_reference(probability: float) -> None:
    for size in [*range(67), 319, 1000, 4095, 4096, 4097, 20_011]:
        codes = codes_with_runs(size, probability, size)
        payload = zero_run_encode(codes, workspace=WORKSPACE).copy()
        assert np.array_equal(payload, reference.zero_run_encode(codes, workspace=WORKSPACE))
        assert np.array_equal(zero_run_decode(payload, size, workspace=WORKSPACE), codes)


def test_zero_runs_of_every_length_at_every_offset() -> None:
    for offset in range(17):
        for run in range(62):
            codes = np.array([7] * offset + [121] * run + [9], dtype=np.uint8)
            payload = zero_run_encode(codes, workspace=WORKSPACE)
            assert payload.tolist() == reference.zero_run_encode(codes, workspace=WORKSPACE).tolist()


def test_zero_run_decode_takes_any_split_of_a_run() -> None:
    for split in ([243, 121, 244], [121] * 6, [247], [243] * 3):
        assert zero_run_decode(bytes(split), 6, workspace=WORKSPACE).tolist() == [121] * 6
    for impl in (kernels, reference):
        with pytest.raises(FrameError, match="holds 15 codes of five values, the shape asks for 14"):
            impl.zero_run_decode(b"\xff\x79", 14, workspace=WORKSPACE)


@pytest.mark.parametrize("layout", ["stride", "partition"])
@pytest.mark.parametrize("pad", [0, 1])
def test_packing_equals_the_reference_and_round_trips(layout: str, pad: int) -> None:
    rng = np.random.default_rng(1)
    for size in [*range(24), 319, 4096, 20_479, 20_480, 20_481, 100_003]:
        trits = rng.integers(-1, 2, size).astype(np.int8)
        codes = pack_base243(trits, layout=layout, pad=pad, workspace=WORKSPACE)
        wanted = reference.pack_base243(trits, layout=layout, pad=pad, workspace=WORKSPACE)
        assert np.array_equal(codes, wanted)
        out = np.full(size, 5, dtype=np.int8)
        assert unpack_base243(codes, out=out, layout=layout, workspace=WORKSPACE) is out
        assert np.array_equal(out, trits)


def test_unpacking_refuses_bad_codes_and_touches_nothing() -> None:
    out = np.full(6, 5, dtype=np.int8)
    for impl in (kernels, reference):
        for codes, match in (([121], "shape asks for 2"), ([121, 243], "byte 243 among"), ([0] * 3, "asks for 2")):
            with pytest.raises(FrameError, match=match):
                impl.unpack_base243(np.array(codes, dtype=np.uint8), out=out, workspace=WORKSPACE)
    assert out.tolist() == [5] * 6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_max_magnitude(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    for size in (0, 1, 5, 64, 1001):
        values = rng.standard_normal(size).astype(dtype)
        assert max_magnitude(values) == reference.max_magnitude(values)
    assert max_magnitude(np.array([-0.0], dtype=dtype)) == 0.0
    assert max_magnitude(np.array([1.0, -np.inf, 2.0], dtype=dtype)) == np.inf
    assert np.isnan(max_magnitude(np.array([1.0, np.nan, np.inf], dtype=dtype)))


def test_a_workspace_grows_once_and_is_used_again() -> None:
    workspace = Workspace()
    values = np.ones(50_000, dtype=np.float32)
    kernels.encode_ternary(values, sparsity=1.0, workspace=workspace)
    buffer, held = workspace.payload.bytes, workspace.nbytes
    for size in (50_000, 10, 49_999):
        _, payload = kernels.encode_ternary(values[:size], sparsity=1.0, workspace=workspace)
        assert np.shares_memory(payload, buffer)
    assert workspace.nbytes == held


def test_a_payload_decodes_in_the_workspace_that_made_it() -> None:
    values = np.where(np.arange(3000) % 3, 0.0, 1.0).astype(np.float32)
    workspace, out = Workspace(), np.empty(3000, dtype=np.float32)
    scale, payload = kernels.encode_ternary(values, sparsity=1.0, workspace=workspace)
    kernels.decode_ternary(payload, scale=scale, out=out, workspace=workspace)
    assert np.array_equal(out, values)


def test_the_surface_is_what_the_package_lists() -> None:
    public = {name for name in kernels.__all__ if name != "Workspace"}
    for name in public:
        assert callable(getattr(reference, name)), f"the reference lacks {name}"
