"""`qsgd`, `dithering`, `truncate`: levels, buckets and bits, beyond the contract."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.frames import Flags, Frame


def normal(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(size).standard_normal(size).astype(np.float32))


def test_qsgd_has_a_norm_for_each_bucket() -> None:
    tensor = normal(1300)
    scales = tw.frames.parse(tw.codec("qsgd").encode(tensor)).scales
    assert scales == pytest.approx([part.norm().item() for part in torch.split(tensor, 512)], rel=1e-6)
    scales = tw.frames.parse(tw.codec("qsgd", norm="max", bucket=100).encode(tensor)).scales
    assert scales == tuple(part.abs().max().item() for part in torch.split(tensor, 100))


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_qsgd_buckets_of_one_value_are_exact(norm: str) -> None:
    """TernGrad §3.3: in a bucket of one value the value is the scale."""
    tensor = normal(100)
    assert torch.equal(tw.decode(tw.codec("qsgd", levels=1, norm=norm, bucket=1).encode(tensor)), tensor)


def test_dithering_goes_to_a_neighbouring_level() -> None:
    """a ≤ z ≤ b, and P(a) = (b − z)/(b − a) (DoubleSqueeze §3.2)."""
    tensor = torch.tensor([1.0, 0.3])
    context = tw.codec("dithering", levels=4).context(tensor)
    seen = [round(float(tw.decode(context.encode(tensor))[1]), 6) for _ in range(2000)]
    assert set(seen) == {0.25, 0.5}
    assert seen.count(0.5) / 2000 == pytest.approx(0.2, abs=5 * 0.4 / 2000**0.5)


def test_truncation_is_toward_zero_and_only_of_low_bits() -> None:
    cases: list[int] = list(range(24))
    for bits in cases:
        with naming(f"bits={bits!r}"):
            tensor = normal(101)
            decoded = tw.decode(tw.codec("truncate", bits=bits).encode(tensor))
            kept = tensor.numpy().view(np.uint32) & np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)
            assert np.array_equal(decoded.numpy().view(np.uint32), kept)
            wide = tensor.double() / 3
            decoded = tw.decode(tw.codec("truncate", bits=bits).encode(wide))
            mask = np.uint64(0xFFFFFFFFFFFFFFFF << bits & 0xFFFFFFFFFFFFFFFF)
            assert np.array_equal(decoded.numpy().view(np.uint64), wide.numpy().view(np.uint64) & mask)


def test_impossible_payloads_raise_frame_error() -> None:
    cases: list[tuple[Frame, str]] = [
        (Frame("qsgd", "fp32", (3,), (1.0,), 0, struct.pack("<HI", 0, 8) + b"\7"), "0 levels"),
        (Frame("qsgd", "fp32", (3,), (1.0,), 0, struct.pack("<HI", 4, 0) + b"\7"), "buckets of 0"),
        (Frame("qsgd", "fp32", (3,), (1.0,), 0, struct.pack("<HI", 4, 1) + b"\7"), "1 norms"),
        (Frame("qsgd", "fp32", (3,), (1.0,), 0, struct.pack("<HI", 4, 8) + b"\x0f"), "bits over"),
        (Frame("qsgd", "fp32", (3,), (1.0,), 0, b"\4"), "begins with 6 bytes"),
        (Frame("dithering", "fp32", (2,), (1.0,), 0, b"\0"), "2 scales"),
        (Frame("dithering", "fp32", (2,), (1.0, 0.5), 0, b"\0"), "whole number, 1 … 16384"),
        (Frame("dithering", "fp32", (2,), (1.0, 65.0), int(Flags.OPTION_A), b"\0\0"), "whole number, 1 … 64"),
        (Frame("dithering", "fp32", (2,), (1.0, 1.0), 0, b"\x0f"), "level 2 of 1"),
        (Frame("truncate", "fp32", (1,), (), 0, b"\x18\0\0"), "without 24 bits"),
        (Frame("truncate", "fp32", (1,), (), 0, b"\x10\0\0\0"), "without 16 bits"),
        (Frame("truncate", "fp32", (1,), (), 0, b"\x10\x80\x7f"), "NaN or Inf"),
    ]
    for frame, message in cases:
        with naming(f"frame={frame!r}, message={message!r}"), pytest.raises(tw.FrameError, match=message):
            tw.decode(tw.frames.pack(frame))


def test_wrong_options_raise_config_error_with_allowed_values() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("qsgd", {"levels": 0}),
        ("qsgd", {"bucket": 0.5}),
        ("qsgd", {"norm": "l1"}),
        ("dithering", {"levels": 65, "grid": "natural"}),
        ("truncate", {"bits": 24}),
    ]
    for id, options in cases:
        with naming(f"id={id!r}, options={options!r}"), pytest.raises(tw.ConfigError, match="allowed are"):
            tw.codec(id, **options)
