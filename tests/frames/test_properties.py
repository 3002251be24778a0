"""What holds for every frame and for every string of bytes."""

from __future__ import annotations

import math

import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import thinwire as tw
from tests.frames import bytes_of
from thinwire.frames import CODEC_NUMBERS, Flags, Frame, pack, parse
from thinwire.frames.layout import DTYPE_NUMBERS, KNOWN_FLAGS, MAX_VALUES, pack_varint, parse_varint

NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=255).filter(
    lambda name: name not in CODEC_NUMBERS
)
PLAIN = settings(max_examples=200, deadline=None, derandomize=True)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    dtype = draw(st.sampled_from(sorted(DTYPE_NUMBERS)))
    shape = tuple(draw(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**40)), max_size=32)))
    assume(math.prod(filter(None, shape)) <= MAX_VALUES)
    flags = draw(st.integers(0, 0xFFFF)) & KNOWN_FLAGS
    silent = flags & Flags.NON_FINITE
    scale = st.floats(allow_nan=False, allow_infinity=False, width=64 if dtype == "fp64" else 32)
    return Frame(
        codec=draw(st.one_of(st.sampled_from(sorted(CODEC_NUMBERS)), NAMES)),
        dtype=dtype,
        shape=shape,
        scales=() if silent else tuple(draw(st.lists(scale, max_size=20))),
        flags=flags,
        payload=b"" if silent else draw(st.binary(max_size=300)),
    )


@PLAIN
@given(frames())
def test_what_was_packed_is_parsed(frame: Frame) -> None:
    assert parse(pack(frame)) == frame


@PLAIN
@given(frames(), st.data())
def test_there_is_one_form_of_a_frame(frame: Frame, data: st.DataObject) -> None:
    """Any other bytes that parse are another frame: nothing can be said in two ways."""
    packed = pack(frame)
    body = bytearray(packed[:-8])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    forged = bytes(body) + xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(8, "little")
    try:
        parsed = parse(forged)
    except tw.FrameError:
        return
    assert pack(parsed) == forged


@settings(PLAIN, max_examples=500)
@given(st.integers(0, 20), st.integers(0, 0xFFFF), st.integers(0, 5), st.integers(0, 40), st.binary(max_size=120))
def test_random_bodies_with_a_true_checksum(codec: int, flags: int, dtype: int, rank: int, rest: bytes) -> None:
    body = b"TW\x01" + bytes([codec]) + flags.to_bytes(2, "little") + bytes([dtype, rank]) + rest
    forged = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    try:
        parsed = parse(forged)
    except tw.FrameError:
        return
    assert pack(parsed) == forged


@PLAIN
@given(st.integers(0, 2**63 - 1), st.binary(max_size=5))
def test_varints(number: int, after: bytes) -> None:
    written = pack_varint(number)
    assert written == bytes_of.varint(number)
    assert parse_varint(memoryview(written + after), 0, "a number") == (number, len(written))
