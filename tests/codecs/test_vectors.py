"""Worked examples of 3LC (§3, figure 2) and of its baselines (§4.2), through the public calls alone.

The bytes were computed by a plain reference that shares nothing with this code. Steps of the paper: quantise, pack
base-3⁵, encode zero runs; `stride` packs contiguous groups of five, `partition` is the paper's numbered steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.frames import Flags, Frame

ZERO_RUN = int(Flags.OPTION_A)
PARTITION = int(Flags.OPTION_B)


def payload(values: Any, **options: Any) -> list[int]:
    """The 3LC payload of a float32 tensor, as numbers."""
    return list(tw.frames.parse(tw.codec("3lc", **options).encode(np.asarray(values, np.float32))).payload)


def trits(*codes: int) -> list[int]:
    """The values −1, 0, 1 that base-3⁵ codes stand for; as a tensor (s = 1) they quantise to themselves."""
    return [code // 3 ** (4 - j) % 3 - 1 for code in codes for j in range(5)]


def decode_payload(numbers: list[int], size: int, flags: int = ZERO_RUN) -> list[float]:
    frame = Frame("3lc", "fp32", (size,), (1.0,), flags, bytes(numbers))
    values: list[float] = tw.decode(tw.frames.pack(frame)).tolist()
    return values


# ---- packing and zero runs


@pytest.mark.parametrize("layout", ["stride", "partition"])
@pytest.mark.parametrize(
    ("values", "code"),
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
def test_place_values(values: list[int], code: int, layout: str) -> None:
    assert payload(values, layout=layout, zero_run=False) == [code]


def test_zero_runs() -> None:
    cases: list[tuple[int, list[int]]] = [
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
    ]
    for run, encoded in cases:
        with naming(f"run={run!r}, encoded={encoded!r}"):
            assert payload([0.0] * (5 * run)) == encoded
            assert payload(trits(5, *[121] * run, 7)) == [5, *encoded, 7]


def test_runs_are_canonical_and_any_split_decodes() -> None:
    cases: list[tuple[list[int], list[int], list[int]]] = [
        ([5, *[121] * 39, 7], [5, 255, 255, 252, 7], [5, 250, 255, 255, 243, 7]),
        ([9, 121, 121, 9], [9, 243, 9], [9, 121, 121, 9]),
        ([121] * 6, [247], [243, 243, 243]),
        ([121] * 6, [247], [121] * 6),
    ]
    for codes, serial, split in cases:
        with naming(f"{codes!r}"):
            values = trits(*codes)
            if any(values):
                assert payload(values) == serial
            assert decode_payload(serial, len(values)) == values
            assert decode_payload(split, len(values)) == values


# ---- the whole pipeline


TWELVE = [0.30, -0.10, 0, -0.40, 0.15, 0.05, 0.02, 0, -0.01, 0.22, 0, -0.21]


def test_twelve_values() -> None:
    sent = {
        1.0: (0.4, [1, 0, 0, -1, 0, 0, 0, 0, 0, 1, 0, -1], [178, 121, 118], [199, 122, 94], [178, 121, 118]),
        1.5: (0.6, [0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0], [94, 121, 121], [118, 121, 121], [94, 243]),
        1.9: (0.76, [0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0], [94, 121, 121], [118, 121, 121], [94, 243]),
    }
    for sparsity, (scale, quantised, partition, stride, runs) in sent.items():
        with naming(f"{sparsity!r}"):
            options: dict[str, Any] = {"sparsity": sparsity}
            assert payload(TWELVE, layout="partition", zero_run=False, **options) == partition
            assert payload(TWELVE, layout="stride", zero_run=False, **options) == stride
            assert payload(TWELVE, layout="partition", **options) == runs
            context = tw.codec("3lc", layout="partition", **options).context(torch.zeros(12))
            frame = context.encode(torch.tensor(TWELVE))
            parsed = tw.frames.parse(frame)
            assert parsed.scales == (float(np.float32(sparsity) * np.float32(0.4)),)
            assert parsed.scales[0] == pytest.approx(scale)
            assert parsed.flags == ZERO_RUN | PARTITION
            decoded = torch.tensor(quantised) * torch.tensor(parsed.scales[0])
            assert torch.equal(tw.decode(frame), decoded)
            assert context.residual is not None
            assert torch.allclose(context.residual, torch.tensor(TWELVE) - decoded, atol=1e-7)


def test_three_steps_with_error_accumulation() -> None:
    """Step 2 multiplies the largest magnitude of the sum (0.6), not of the input (0.3)."""
    context = tw.codec("3lc", sparsity=1.75, layout="partition").context(torch.zeros(6))
    steps: list[tuple[list[float], float, list[int], list[float]]] = [
        ([0.4, 0.1, -0.2, 0, 0.3, -0.4], 0.7, [202, 112], [-0.3, 0.1, -0.2, 0, 0.3, 0.3]),
        ([0.1, 0.1, -0.2, 0, 0.3, 0.1], 1.05, [130, 121], [-0.2, 0.2, -0.4, 0, -0.45, 0.4]),
        ([0, 0.1, 0, 0, 0, 0], 0.7875, [85, 130], [-0.2, 0.3, 0.3875, 0, 0.3375, -0.3875]),
    ]
    for tensor, scale, wire, residual in steps:
        parsed = tw.frames.parse(context.encode(torch.tensor(tensor)))
        assert parsed.scales[0] == pytest.approx(scale)
        assert list(parsed.payload) == wire
        assert context.residual is not None
        assert context.residual.tolist() == pytest.approx(residual, abs=1e-6)


def test_sparsity_just_below_two_still_sends() -> None:
    cases: list[float] = [1.9, 1.999, 1.9999999, float(np.nextafter(np.float32(2), np.float32(0)))]
    for sparsity in cases:
        with naming(f"sparsity={sparsity!r}"):
            frame = tw.codec("3lc", sparsity=sparsity).encode(torch.tensor([1.0, -0.3]))
            scale = float(np.float32(sparsity))
            assert tw.frames.parse(frame).scales == (scale,)
            assert tw.decode(frame).tolist() == [scale, 0.0]


def test_negative_zero_is_zero() -> None:
    assert payload([-0.0] * 5) == [121]


def test_the_average_magnitude_is_kept_where_thresholding_shrinks_it() -> None:
    """3LC §3.1, of codecs with a residual, which is where all arrives."""

    def kept(codec: tw.Codec) -> float:
        draw = torch.Generator().manual_seed(0)
        given = [torch.randn(2_000, generator=draw) for _ in range(300)]
        context = codec.context(given[0])
        got = [tw.decode(context.encode(tensor)).abs().mean() for tensor in given]
        settled = slice(150, None)
        return float(sum(got[settled]) / sum(tensor.abs().mean() for tensor in given[settled]))

    assert kept(tw.codec("3lc")) > 0.9
    assert kept(tw.codec("3lc", sparsity=1.75)) > 0.7
    assert kept(tw.codec("topk", fraction=0.05)) < 0.5


# ---- 8-bit int


def test_int8() -> None:
    frame = tw.codec("int8").encode(np.array([1.27, -0.635, 0.01, -1.27, 0], np.float32))
    parsed = tw.frames.parse(frame)
    assert np.frombuffer(parsed.payload, np.int8).tolist() == [127, -64, 1, -127, 0]
    assert parsed.scales[0] == pytest.approx(0.01)
