"""`topk` and means over senders: the papers' numbers, the payload's two forms, and the lies it could tell."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.codecs import CheckedFrame, open_frame
from thinwire.codecs.senders import SenderMeans
from thinwire.frames import Flags, Frame

V = torch.tensor([0.1, -3.0, 0.2, 2.0, 0.0, -0.1, 0.05, 1.0, -0.4, 0.3])


def normal(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(size).standard_normal(size).astype(np.float32))


# ---- top-k (DoubleSqueeze §3.2)


def test_topk_of_the_worked_example() -> None:
    cases: list[tuple[int, list[float]]] = [
        (1, [3.0, 0.0, 0.0, 0.0]),
        (2, [3.0, -3.0, 0.0, 0.0]),
        (9, [3.0, -3.0, 1.0, 2.0]),
    ]
    for k, decoded in cases:
        with naming(f"k={k!r}, decoded={decoded!r}"):
            tensor = torch.tensor([3.0, -3.0, 1.0, 2.0])
            assert tw.decode(tw.codec("topk", k=k).encode(tensor)).tolist() == decoded


def test_topk_20_percent_as_a_bitmap() -> None:
    frame = tw.codec("topk", fraction=0.2, positions="bitmap").encode(V)
    assert bytes(tw.frames.parse(frame).payload) == bytes([80, 0]) + struct.pack("<ff", -3.0, 2.0)
    assert tw.decode(frame).tolist() == [0, -3, 0, 2, 0, 0, 0, 0, 0, 0]


def test_topk_20_percent_as_indices() -> None:
    frame = tw.codec("topk", fraction=0.2, positions="index").encode(V)
    assert bytes(tw.frames.parse(frame).payload) == bytes([2, 1 | 3 << 4]) + struct.pack("<ff", -3.0, 2.0)


def test_index_of_a_single_value_takes_one_bit() -> None:
    """⌈log2 1⌉ would be none."""
    frame = tw.codec("topk", k=1, positions="index").encode(torch.ones(1))
    assert bytes(tw.frames.parse(frame).payload) == bytes([1, 0]) + struct.pack("<f", 1.0)


def test_topk_fraction_rounds_up() -> None:
    cases: list[int] = [1, 7, 1000, 1001]
    for size in cases:
        with naming(f"size={size!r}"):
            tensor = normal(size)
            for fraction, count in ((0.01, -(-size // 100)), (0.07, -(-7 * size // 100)), (1.0, size)):
                assert int(tw.decode(tw.codec("topk", fraction=fraction).encode(tensor)).count_nonzero()) == count


def test_positions_auto_takes_the_shorter_form() -> None:
    tensor = normal(4096)
    for fraction in (0.001, 0.02, 0.07, 0.09, 0.5, 1.0):
        sizes = {
            form: len(tw.codec("topk", fraction=fraction, positions=form).encode(tensor))
            for form in ("auto", "bitmap", "index")
        }
        assert sizes["auto"] == min(sizes.values())


def test_topk_never_sends_zeros() -> None:
    tensor = torch.zeros(5000)
    tensor[17] = 2.0
    parsed = tw.frames.parse(tw.codec("topk", k=100).encode(tensor))
    assert len(parsed.payload) <= 8, "one index and one value"


# ---- lies


INDEX = Frame("topk", "fp32", (10,), (), 0, bytes([2, 1 | 3 << 4]) + struct.pack("<ff", -3.0, 2.0))
BITMAP = Frame("topk", "fp32", (10,), (), int(Flags.OPTION_A), bytes([80, 0]) + struct.pack("<ff", -3.0, 2.0))


def forged(frame: Frame, payload: bytes | None = None, **changes: Any) -> bytes:
    fields = {name: getattr(frame, name) for name in ("codec", "dtype", "shape", "scales", "flags", "payload")}
    return tw.frames.pack(Frame(**{**fields, **({} if payload is None else {"payload": payload}), **changes}))


def test_sparse_invalid_payloads_raise_frame_error() -> None:
    cases: list[tuple[bytes, str]] = [
        (forged(INDEX, bytes([2, 3 | 1 << 4]) + struct.pack("<ff", -3.0, 2.0)), "ascending"),
        (forged(INDEX, bytes([2, 3 | 3 << 4]) + struct.pack("<ff", -3.0, 2.0)), "ascending"),
        (forged(INDEX, bytes([2, 3 | 12 << 4]) + struct.pack("<ff", -3.0, 2.0)), "past the last"),
        (forged(INDEX, bytes([1, 3 | 1 << 4]) + struct.pack("<f", -3.0)), "padding"),
        (forged(INDEX, bytes([2, 1 | 3 << 4]) + struct.pack("<ff", float("nan"), 2.0)), "NaN or Inf"),
        (forged(INDEX, bytes([11, 1 | 3 << 4]) + struct.pack("<ff", 1.0, 2.0)), "11 of 10"),
        (forged(INDEX, bytes(INDEX.payload[:-1])), "payload bytes"),
        (forged(INDEX, bytes(INDEX.payload) + b"\0"), "2 values take 8 bytes"),
        (forged(INDEX, scales=(1.0,)), "scales"),
        (forged(INDEX, shape=(2**38,)), "32 bits"),
        (forged(BITMAP, bytes([80, 32]) + struct.pack("<fff", -3.0, 2.0, 1.0)), "behind the last"),
        (forged(BITMAP, bytes([80, 64]) + bytes(BITMAP.payload[2:])), "3 values take 12 bytes"),
        (forged(BITMAP, bytes([80, 0]) + struct.pack("<ff", float("inf"), 2.0)), "NaN or Inf"),
    ]
    for bytes_, message in cases:
        with naming(f"bytes_={bytes_!r}, message={message!r}"):
            out = torch.full(tw.frames.parse(bytes_).shape, 7.0) if tw.frames.parse(bytes_).size < 100 else None
            with pytest.raises(tw.FrameError, match=message):
                tw.decode(bytes_, out=out)
            assert out is None or bool((out == 7.0).all())


CODECS: list[tuple[str, dict[str, Any]]] = [
    ("blocktopk", {"block": 64, "k": 9}),
    ("blocktopk", {"block": 64, "k": 9, "layout": "tiles", "bits": 8}),
    ("topk", {"fraction": 0.2}),
    ("topk", {"fraction": 0.2, "positions": "bitmap"}),
]


def messages(codec: tw.Codec) -> list[CheckedFrame]:
    """Returns the messages of three senders; the last one's norm is ten times as large."""
    dice = np.random.default_rng(3)
    drawn = [dice.standard_normal((24, 40)).astype(np.float32) * scale for scale in (1, 1.2, 10)]
    return [open_frame(codec.encode(values)) for values in drawn]


def test_sender_means_divide_each_value_by_its_number_of_senders() -> None:
    for name, options in CODECS:
        for clip in (False, True):
            with naming(f"{name} {options} {clip=}"):
                frames = messages(tw.codec(name, **options))
                dense = np.zeros((3, 960), np.float32)
                for row, frame in zip(dense, frames, strict=True):
                    frame.decode_flat(row, accumulate=False)
                norms = np.linalg.norm(dense.astype(np.float64), axis=1)
                factors = np.minimum(1, np.median(norms) / norms) if clip else np.ones(3)
                senders = (dense != 0).sum(0)
                wanted = (factors[:, None] * dense).sum(0) / np.maximum(senders, 1)
                assert set(senders) >= {0, 1, 2}
                out = np.full(960, np.nan, np.float32)
                means = SenderMeans(out, clip=clip)
                for _ in range(2):  # a second update begins anew
                    for frame in frames:
                        means.add(frame)
                    means.fill()
                    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def test_clip_takes_the_lower_median_and_ignores_zero_messages() -> None:
    codec = tw.codec("topk", k=1)
    told = [np.array(values, np.float32) for values in ([1, 0, 0], [0, 4, 0], [0, 0, 3], [0, 0, 0], [2, 0, 0])]
    out = np.zeros(3, np.float32)
    means = SenderMeans(out, clip=True)
    for values in told:
        means.add(open_frame(codec.encode(values)))
    means.fill()
    # Of 1, 4, 3 and 2 the lower median is 2.
    assert out.tolist() == [1.5, 2.0, 2.0]


def test_sender_means_damaged_payload_keeps_earlier_frames() -> None:
    codec = tw.codec("blocktopk", block=64, k=9)
    good, other, _ = messages(codec)
    parsed = tw.frames.parse(codec.encode(np.ones(960, np.float32)))
    payload = bytes(parsed.payload)
    bad = open_frame(tw.frames.pack(replace(parsed, payload=payload[:5] + b"\xff" * 200)))
    out, expected = np.zeros(960, np.float32), np.zeros(960, np.float32)
    means, alone = SenderMeans(out), SenderMeans(expected)
    means.add(good)
    with pytest.raises(tw.FrameError):
        means.add(bad)
    means.add(other)
    means.fill()
    for frame in (good, other):
        alone.add(frame)
    alone.fill()
    assert np.array_equal(out, expected)
