"""Writing frames: the bytes are those that docs/wire-format.md describes."""

from __future__ import annotations

import pytest

from tests.frames import bytes_of
from thinwire.frames import Frame, pack
from thinwire.frames.layout import pack_varint, parse_varint


def test_a_frame_is_the_documented_bytes() -> None:
    frame = Frame("3lc", "fp32", (3, 4), (0.7,), 0x0100, b"\x76\xf3")
    assert pack(frame) == bytes_of.frame()


def test_a_named_codec_carries_its_name() -> None:
    frame = Frame("mine", "fp64", (300,), (0.1, -2.0), 0x0300, b"xyz")
    written = bytes_of.frame(
        codec=b"\x00\x04mine",
        flags=0x0300,
        dtype=4,
        dims=(b"\xac\x02",),
        scales=(0.1, -2.0),
        payload=b"xyz",
    )
    assert pack(frame) == written


def test_the_smallest_frame() -> None:
    assert pack(Frame("fp32", "fp16", ())) == bytes_of.frame(
        codec=b"\x01", flags=0, dtype=2, dims=(), scales=(), payload=b""
    )


def test_views_are_written_like_bytes() -> None:
    assert pack(Frame("fp32", "fp32", (1,), payload=memoryview(b"abcd"))) == pack(
        Frame("fp32", "fp32", (1,), payload=b"abcd")
    )


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**35, 2**63 - 1])
def test_varints(number: int) -> None:
    written = pack_varint(number)
    assert written == bytes_of.varint(number)
    assert parse_varint(memoryview(written), 0, "a number") == (number, len(written))


@pytest.mark.parametrize("number", [-1, 2**63])
def test_numbers_that_no_varint_holds(number: int) -> None:
    with pytest.raises(ValueError, match="holds 0"):
        pack_varint(number)
