"""Frames from a peer that lies: every enrolled codec refuses them with FrameError, before `out` or memory is touched.

Lies about the header are in `tests/frames`; here the header is in order and the payload is not, or they disagree.
`python -m tests.codecs.fuzz` sends 100,000 frames to each codec; here it is a few thousand.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs import fuzz, samples
from tests.codecs.contract import ENROLLED, Enrolled
from tests.codecs.test_contract import every_codec
from thinwire import frames
from thinwire.codecs import registry
from thinwire.codecs.entropy_stage import EntropyStage
from thinwire.codecs.floats import FP32
from thinwire.codecs.scratch import ScratchPool
from thinwire.frames import Flags, Frame
from thinwire.frames.layout import OPTION_MASK

STAGE = EntropyStage()
ZERO_RUN = int(Flags.OPTION_A)


def parsed(entry: Enrolled, size: int = 319) -> Frame:
    return frames.parse(entry.codec.encode(samples.tensor(samples.normal(size), "fp32")))


def with_payload(frame: Frame, payload: bytes) -> Frame:
    """The frame with another payload behind the same zstd stage."""
    if frame.zstd:
        packed = STAGE.compress(payload)
        assert packed is not None
        payload = packed
    return replace(frame, payload=payload)


def raw_payload(frame: Frame) -> bytes:
    return STAGE.decompress(frame.payload, 1 << 20) if frame.zstd else bytes(frame.payload)


def assert_refused(frame: Frame, message: str = ".") -> None:
    data = frames.pack(frame)
    with pytest.raises(tw.FrameError, match=message):
        tw.decode(data)
    for accumulate in (False, True):
        guarded = fuzz.Guarded(frame.shape)
        guarded.reset()
        with pytest.raises(tw.FrameError, match=message):
            tw.decode(data, out=guarded.out, accumulate=accumulate)
        assert guarded.untouched()


# ---- thousands of mutations


@every_codec
def test_mutated_frames(entry: Enrolled) -> None:
    fates = fuzz.attack(entry, 1500, seed=1)
    assert fates["refused"] > 500, f"the mutations hardly reach the decoder: {fates}"
    assert fates["decoded"] > 30, f"the mutations hardly pass the parser: {fates}"


@every_codec
def test_memory_stays_bounded(entry: Enrolled) -> None:
    fuzz.attack(entry, 100, seed=2)  # grows the workspaces, which stay
    tracemalloc.start()
    try:
        fuzz.attack(entry, 300, seed=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * fuzz.MOST_VALUES * 8, f"{peak} bytes for frames of a few thousand"


# ---- header and payload that disagree


@every_codec
def test_a_payload_cut_by_a_byte(entry: Enrolled) -> None:
    frame = parsed(entry)
    assert_refused(with_payload(frame, raw_payload(frame)[:-1]))


@every_codec
def test_a_payload_with_a_byte_too_many(entry: Enrolled) -> None:
    frame = parsed(entry)
    for extra in (b"\0", b"\x79", b"\xff"):
        assert_refused(with_payload(frame, raw_payload(frame) + extra))


@every_codec
def test_no_payload(entry: Enrolled) -> None:
    assert_refused(replace(parsed(entry), payload=b"", flags=parsed(entry).flags & ~int(Flags.ZSTD)))


@every_codec
@pytest.mark.parametrize("size", [1 << 30, 1 << 38])
def test_a_shape_that_the_payload_cannot_fill(entry: Enrolled, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every codec knows how few bytes a shape can take; less is refused before the shape is allocated."""

    def never(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        raise AssertionError(f"a tensor of {shape} was allocated")

    frame = parsed(entry)
    monkeypatch.setattr("thinwire.codecs.decoding.empty", never)
    tracemalloc.start()
    try:
        with pytest.raises(tw.FrameError):
            tw.decode(frames.pack(replace(frame, shape=(size,))))
        with pytest.raises(tw.FrameError):
            tw.decode(frames.pack(replace(frame, payload=b"", flags=frame.flags & ~int(Flags.ZSTD))))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@every_codec
def test_scales_too_few_or_too_many(entry: Enrolled) -> None:
    frame = parsed(entry)
    assert_refused(replace(frame, scales=(*frame.scales, 1.0)))
    if frame.scales:
        assert_refused(replace(frame, scales=frame.scales[:-1]))


@every_codec
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_scales_at_the_end_of_the_range(entry: Enrolled, dtype: str) -> None:
    """Refused or finite: one Inf in a sum would spread to every worker."""
    top = float(np.finfo(np.float32 if dtype == "fp32" else np.float64).max)
    frame = frames.parse(entry.codec.encode(samples.tensor(samples.normal(319), dtype)))
    for scale in (top, -top, top / 2, 1e-45):
        forged = frames.pack(replace(frame, scales=(scale,) * len(frame.scales)))
        try:
            assert torch.isfinite(tw.decode(forged)).all()
        except tw.FrameError:
            continue


@every_codec
def test_option_flags_of_another_codec(entry: Enrolled) -> None:
    frame = parsed(entry)
    known = entry.codec.scheme.option_flags
    assert frame.flags & OPTION_MASK & ~known == 0, "the codec sets flags that it does not declare in `option_flags`"
    for flag in (Flags.OPTION_A, Flags.OPTION_B, Flags.OPTION_C, Flags.OPTION_D):
        if not flag & known:
            assert_refused(replace(frame, flags=frame.flags | flag), "mean nothing to this codec")


@every_codec
def test_a_refusal_that_carries_a_payload(entry: Enrolled) -> None:
    frame = parsed(entry)
    assert_refused(replace(frame, flags=frame.flags | Flags.NON_FINITE), "NaN or Inf")


@every_codec
def test_empty_tensors_carry_nothing(entry: Enrolled) -> None:
    frame = replace(parsed(entry), shape=(0, 7), payload=b"", scales=(), flags=0)
    assert tw.decode(frames.pack(frame)).shape == (0, 7)
    assert_refused(replace(frame, payload=b"\0"), "empty")
    assert_refused(replace(frame, scales=(1.0,)), "empty")
    assert_refused(replace(frame, flags=int(Flags.ZSTD)), "empty")


# ---- lies that only one codec can tell


def three_lc_frame(payload: bytes, size: int, flags: int = ZERO_RUN, scales: tuple[float, ...] = (1.0,)) -> Frame:
    return Frame("3lc", "fp32", (size,), scales, flags, payload)


@pytest.mark.parametrize(
    ("payload", "size", "flags"),
    [
        (b"\xf3", 5, 0),  # a run where runs are off
        (b"\xff", 5, ZERO_RUN),  # a run past the end
        (b"\x79\xf3", 10, ZERO_RUN),  # the last run one too long
        (b"\xf3\x79\x79", 15, ZERO_RUN),  # one group too many
        (b"\xff" * 4, 1000, ZERO_RUN),  # too few groups
        (b"\x00" * 3, 10, 0),
    ],
)
def test_3lc_runs_and_codes(payload: bytes, size: int, flags: int) -> None:
    assert_refused(three_lc_frame(payload, size, flags))


@pytest.mark.parametrize("scales", [(), (1.0, 1.0), (-1.0,), (-1e-45,)])
def test_3lc_scale(scales: tuple[float, ...]) -> None:
    assert_refused(three_lc_frame(b"\x79", 5, scales=scales), "scale")


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_floats_that_are_not_finite(codec: str, value: float) -> None:
    numbers = np.array([1.0] * 70_000 + [value], np.float32)
    payload = {
        "fp32": numbers.tobytes(),
        "fp16": numbers.astype(np.float16).tobytes(),
        "bf16": (numbers.view(np.uint32) >> 16).astype("<u2").tobytes(),
    }
    assert_refused(Frame(codec, "fp32", numbers.shape, payload=payload[codec]), "NaN or Inf")


def test_int8_level_that_is_not_used() -> None:
    assert_refused(Frame("int8", "fp32", (2,), (1.0,), payload=b"\x80\x01"), "-128")


@pytest.mark.parametrize("scale", [-1.0, 3e38])
def test_int8_scale(scale: float) -> None:
    assert_refused(Frame("int8", "fp32", (2,), (scale,), payload=b"\x7f\x01"), "scale")


# ---- codecs that are not here


def test_a_numbered_codec_that_is_not_registered() -> None:
    other = registry.Registry([FP32], ScratchPool())
    with pytest.raises(tw.FrameError, match="not registered here: unknown codec '3lc'; there are"):
        other.decoder.decode(frames.pack(three_lc_frame(b"\x79", 5)))


def test_a_named_codec_that_is_not_registered() -> None:
    with pytest.raises(tw.FrameError, match="not registered here: unknown codec 'unheard-of'"):
        tw.decode(frames.pack(Frame("unheard-of", "fp32", (1,), payload=b"abcd")))


def test_enrolled_codecs_are_attacked_from_valid_frames() -> None:
    for entry in ENROLLED:
        for frame in fuzz.seeds(entry):
            tw.decode(frame)
