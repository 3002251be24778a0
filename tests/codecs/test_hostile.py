"""Frames from a peer that lies: every enrolled codec refuses them with FrameError, before `out` or memory is touched.

Lies about the header are in `tests/frames`; here the header is in order and the payload is not, or they disagree.
`python -m tests.codecs.fuzz` sends 100,000 frames to each codec; here it is a few thousand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs import fuzz, samples
from tests.codecs.contract import ENROLLED, Enrolled, every_codec, naming, one_item
from thinwire import frames
from thinwire.codecs import registry
from thinwire.codecs.entropy_stage import EntropyStage
from thinwire.codecs.floats import FP32
from thinwire.codecs.scratch import ScratchPool
from thinwire.frames import Flags, Frame
from thinwire.frames.layout import OPTION_MASK

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
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
    fates = fuzz.attack(entry, 500, seed=1)
    assert fates["refused"] > 160, f"the mutations hardly reach the decoder: {fates}"
    assert fates["decoded"] > 8, f"the mutations hardly pass the parser: {fates}"


@pytest.mark.long
def test_many_more_mutated_frames_in_limited_memory() -> None:
    """`python -m tests.codecs.fuzz` with its own memory limit: minutes."""
    command = [sys.executable, "-m", "tests.codecs.fuzz", "--count", "20000", "--seed", "5"]
    subprocess.run(command, check=True, timeout=1800, cwd=ROOT)


def test_decoding_memory_follows_received_bytes_not_declared_shapes() -> None:
    """Runs `memory.py`, which measures its own process' memory from outside Python."""
    command = [sys.executable, "-m", "tests.codecs.memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("touching")["touched"] > 60 * MIB and found.pop("reserving")["reserved"] > 4000 * MIB
    for case, grown in found.items():
        assert grown["touched"] < 8 * MIB and grown["reserved"] < 32 * MIB, f"{case}: {grown}"


# ---- header and payload that disagree


def test_zstd_stage_is_not_undone_for_an_out_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = tw.codec("fp32", entropy="zstd").encode(torch.zeros(1 << 16))
    assert len(frame) < 1 << 10
    monkeypatch.setattr(EntropyStage, "decompress", None)
    with pytest.raises(tw.ConfigError, match=r"out has shape \(10,\); the frame holds \(65536,\)"):
        tw.decode(frame, out=torch.zeros(10))


@one_item
def test_payload_too_short_too_long_or_missing_is_refused(entry: Enrolled) -> None:
    frame = parsed(entry)
    payload = STAGE.decompress(frame.payload, 1 << 20) if frame.zstd else bytes(frame.payload)
    for other in (payload[:-1], *(payload + extra for extra in (b"\0", b"\x79", b"\xff"))):
        assert_refused(with_payload(frame, other))
    assert_refused(replace(frame, payload=b"", flags=frame.flags & ~int(Flags.ZSTD)))


def test_shape_larger_than_the_payload_is_refused_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every codec knows how few bytes a shape can take; less is refused before the shape is allocated."""

    def never(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        raise AssertionError(f"a tensor of {shape} was allocated")

    frames_of = {entry.label: parsed(entry) for entry in ENROLLED}
    monkeypatch.setattr("thinwire.codecs.registry.empty", never)
    for label, frame in frames_of.items():
        forged = [replace(frame, shape=(size,)) for size in (1 << 30, 1 << 38)]
        for bad in (*forged, replace(frame, payload=b"", flags=frame.flags & ~int(Flags.ZSTD))):
            with naming(label), pytest.raises(tw.FrameError):
                tw.decode(frames.pack(bad))


@one_item
def test_wrong_number_of_scales_is_refused(entry: Enrolled) -> None:
    frame = parsed(entry)
    assert_refused(replace(frame, scales=(*frame.scales, 1.0)))
    if frame.scales:
        assert_refused(replace(frame, scales=frame.scales[:-1]))


@one_item
def test_largest_scales_are_refused_or_decode_to_finite_values(entry: Enrolled) -> None:
    """Refused or finite: one Inf in a sum would spread to every worker."""
    for dtype, kind in (("fp32", np.float32), ("fp64", np.float64)):
        top = float(np.finfo(kind).max)
        frame = frames.parse(entry.codec.encode(samples.tensor(samples.normal(319), dtype)))
        for scale in (top, -top, top / 2, 1e-45):
            forged = frames.pack(replace(frame, scales=(scale,) * len(frame.scales)))
            try:
                assert torch.isfinite(tw.decode(forged)).all(), f"scale {scale} of {dtype}"
            except tw.FrameError:
                continue


@one_item
def test_option_flags_of_another_codec_are_refused(entry: Enrolled) -> None:
    frame = parsed(entry)
    known = entry.codec.scheme.option_flags
    assert not frame.flags & OPTION_MASK & ~known, "flags are set that `option_flags` does not declare"
    for flag in (Flags.OPTION_A, Flags.OPTION_B, Flags.OPTION_C, Flags.OPTION_D):
        if not flag & known:
            assert_refused(replace(frame, flags=frame.flags | flag), "mean nothing to this codec")


@one_item
def test_non_finite_frame_with_a_payload_is_refused(entry: Enrolled) -> None:
    frame = parsed(entry)
    assert_refused(replace(frame, flags=frame.flags | Flags.NON_FINITE), "NaN or Inf")


@one_item
def test_empty_tensor_with_payload_or_scales_is_refused(entry: Enrolled) -> None:
    frame = replace(parsed(entry), shape=(0, 7), payload=b"", scales=(), flags=0)
    assert tw.decode(frames.pack(frame)).shape == (0, 7)
    assert_refused(replace(frame, payload=b"\0"), "empty")
    assert_refused(replace(frame, scales=(1.0,)), "empty")
    assert_refused(replace(frame, flags=int(Flags.ZSTD)), "empty")


# ---- lies that only one codec can tell


def three_lc_frame(payload: bytes, size: int, flags: int = ZERO_RUN, scales: tuple[float, ...] = (1.0,)) -> Frame:
    return Frame("3lc", "fp32", (size,), scales, flags, payload)


def test_3lc_runs_and_codes() -> None:
    cases: list[tuple[bytes, int, int]] = [
        (b"\xf3", 5, 0),  # a run where runs are off
        (b"\xff", 5, ZERO_RUN),  # a run past the end
        (b"\x79\xf3", 10, ZERO_RUN),  # the last run one too long
        (b"\xf3\x79\x79", 15, ZERO_RUN),  # one group too many
        (b"\xff" * 4, 1000, ZERO_RUN),  # too few groups
        (b"\x00" * 3, 10, 0),
    ]
    for payload, size, flags in cases:
        with naming(f"{payload!r}"):
            assert_refused(three_lc_frame(payload, size, flags))
    for scales in ((), (1.0, 1.0), (-1.0,), (-1e-45,)):
        with naming(f"{scales=}"):
            assert_refused(three_lc_frame(b"\x79", 5, scales=scales), "scale")


def test_not_finite_floats_are_refused() -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        numbers = np.array([1.0] * 70_000 + [value], np.float32)
        for codec, payload in (
            ("fp32", numbers.tobytes()),
            ("fp16", numbers.astype(np.float16).tobytes()),
            ("bf16", (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()),
        ):
            with naming(f"{codec} {value}"):
                assert_refused(Frame(codec, "fp32", numbers.shape, payload=payload), "NaN or Inf")


def test_int8_scale_and_level_out_of_range_are_refused() -> None:
    assert_refused(Frame("int8", "fp32", (2,), (1.0,), payload=b"\x80\x01"), "-128")
    for scale in (-1.0, 3e38):
        with naming(f"{scale=}"):
            assert_refused(Frame("int8", "fp32", (2,), (scale,), payload=b"\x7f\x01"), "scale")


# ---- codecs that are not here


def test_unregistered_codec_is_refused() -> None:
    other = registry.Registry([FP32], ScratchPool())
    with pytest.raises(tw.FrameError, match="unknown codec '3lc'"):
        other.decode(frames.pack(three_lc_frame(b"\x79", 5)))
    with pytest.raises(tw.FrameError, match="unknown codec 'unheard-of'"):
        tw.decode(frames.pack(Frame("unheard-of", "fp32", (1,), payload=b"abcd")))
