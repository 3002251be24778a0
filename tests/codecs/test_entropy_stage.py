"""The zstd stage: used only where it shrinks, and no bomb."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import zstandard

import thinwire as tw
from tests.codecs import samples
from tests.codecs.contract import ENROLLED, naming
from thinwire import frames
from thinwire.codecs import entropy_stage
from thinwire.codecs.entropy_stage import EntropyStage
from thinwire.frames import Flags, Frame


def test_zstd_stage_decodes_to_equal_values_for_every_codec() -> None:
    sparse = torch.from_numpy(np.where(np.arange(20_000) % 331 == 0, samples.normal(20_000), 0.0)).float()
    for entry in ENROLLED:
        with naming(entry.label):
            plain, staged = entry.with_options(entropy=None), entry.with_options(entropy="zstd")
            with_stage, without = frames.parse(staged.encode(sparse)), frames.parse(plain.encode(sparse))
            assert len(with_stage.payload) <= len(without.payload)
            assert with_stage.zstd == (len(with_stage.payload) < len(without.payload))
            assert torch.equal(tw.decode(staged.encode(sparse)), tw.decode(plain.encode(sparse)))


def test_zstd_stage_is_used_only_where_it_shrinks() -> None:
    sparse = torch.from_numpy(np.where(np.arange(200_000) % 331 == 0, samples.normal(200_000), 0.0)).float()
    staged, plain = (frames.parse(tw.codec("3lc", entropy=stage).encode(sparse)) for stage in ("zstd", None))
    assert staged.zstd and len(staged.payload) < 0.8 * len(plain.payload)
    for size in (1, 10, 63, 5000):
        noise = np.random.default_rng(4).integers(0, 1 << 30, size, dtype=np.int32).view(np.float32)
        frame = tw.codec("fp32", entropy="zstd").encode(noise)
        assert not frames.parse(frame).zstd and frame == tw.codec("fp32").encode(noise), size
    context = tw.codec("fp32", entropy="zstd").context(torch.zeros(5000))
    frame = context.encode(torch.zeros(5000))
    assert context.payload_nbytes == len(frames.parse(frame).payload) < 100, "what travels is counted"


# ---- bombs


def compress(data: bytes, write_content_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=write_content_size).compress(data)


def declaring(nbytes: int) -> bytes:
    """Returns a zstd frame with one empty block that declares `nbytes`."""
    return b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + nbytes.to_bytes(8, "little") + b"\x01\x00\x00"


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "more than the shape needs": (lambda: compress(bytes(4001)), "declares 4001 bytes"),
    "a gigabyte": (lambda: declaring(1 << 30), "declares 1073741824 bytes"),
    "the most that a header can say": (lambda: declaring(2**64 - 3), "declares"),
    "no size": (lambda: compress(bytes(4000), write_content_size=False), "zstd stage"),
    "less than it holds": (lambda: declaring(10) + bytes(0), "zstd stage"),
    "fewer bytes than the shape takes": (lambda: compress(bytes(3996)), "payload bytes"),
    "noise": (lambda: samples.normal(20).tobytes(), "damaged"),
    "nothing": (lambda: b"", "damaged"),
    "cut": (lambda: compress(samples.normal(500).tobytes())[:-9], "damaged"),
    "two frames": (lambda: compress(bytes(2000)) + compress(bytes(2000)), "zstd stage"),
    "bytes behind it": (lambda: compress(bytes(4000)) + b"\0", "damaged"),
    "bytes behind an empty one": (lambda: compress(b"") + bytes(400), "declares 0 bytes"),
    "a skippable frame": (lambda: b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd", "zstd stage"),
    "bytes behind an empty skippable frame": (lambda: b"\x50\x2a\x4d\x18" + bytes(4) + b"abcd", "declares 0 bytes"),
}


def test_zstd_bombs_raise_frame_error() -> None:
    """The shape takes 4,000 bytes; whatever else the stage says is refused (`memory.py`: before it takes memory)."""
    for bomb, (make, message) in BOMBS.items():
        with naming(bomb):
            data = frames.pack(Frame("fp32", "fp32", (1000,), flags=int(Flags.ZSTD), payload=make()))
            out = torch.full((1000,), -7.0)
            for into in (None, out):
                with pytest.raises(tw.FrameError, match=message):
                    tw.decode(data, out=into)
            assert (out == -7.0).all()


def test_zstd_stage_with_bytes_behind_an_empty_frame_is_refused() -> None:
    """A constant tensor's payload is empty, so that nothing else would look."""
    for data in (compress(b"") + bytes(400), b"\x50\x2a\x4d\x18" + bytes(4) + b"abcd"):
        frame = Frame("entropy", "fp32", (5,), (1.0, 1.0), int(Flags.ZSTD), data)
        with pytest.raises(tw.FrameError, match="declares 0 bytes"):
            tw.decode(frames.pack(frame))


def test_zstd_stage_densest_and_smallest_payloads_decode() -> None:
    """The densest that zstd gets, which is of zeros; and payloads below `MIN_NBYTES`, which we leave alone."""
    payload = compress(bytes(20))
    assert len(payload) < 20 < entropy_stage.MIN_NBYTES
    assert not tw.decode(frames.pack(Frame("fp32", "fp32", (5,), (), int(Flags.ZSTD), payload))).any()
    for nbytes in (1 << 10, 1 << 17, 1 << 24):
        packed = EntropyStage().compress(bytes(nbytes))
        assert packed is not None and nbytes <= len(packed) * entropy_stage.MAX_EXPANSION
        assert EntropyStage().decompress(packed, nbytes) == bytes(nbytes)


def test_zstd_stage_declared_size_is_limited_by_its_bytes() -> None:
    """Without this limit, thirty bytes would make a receiver that trusts the shape allocate it all."""
    data = frames.pack(Frame("fp32", "fp32", (1 << 28,), flags=int(Flags.ZSTD), payload=declaring(1 << 30)))
    with pytest.raises(tw.FrameError, match="more than its 16 can expand to"):
        tw.decode(data)


def test_zstd_stage_with_dictionary_or_large_window_is_refused() -> None:
    with_dictionary = b"\x28\xb5\x2f\xfd" + bytes([0x61]) + b"\x07" + (100).to_bytes(2, "little") + b"\x01\x00\x00"
    with pytest.raises(tw.FrameError, match="dictionary"):
        EntropyStage().decompress(with_dictionary, 4000)
    giant_window = b"\x28\xb5\x2f\xfd" + bytes([0x40, 0xA8]) + (100).to_bytes(2, "little") + b"\x01\x00\x00"
    with pytest.raises(tw.FrameError, match="window"):
        EntropyStage().decompress(giant_window, 4000)
