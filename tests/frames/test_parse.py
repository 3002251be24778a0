"""A frame by hand is the frame of the code; every lie of a header is refused; what holds for any bytes."""

from __future__ import annotations

import contextlib
import math
import tracemalloc

import pytest
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import thinwire as tw
from tests.frames import bytes_of
from tests.frames.bytes_of import frame, varint
from thinwire.frames import CODEC_NUMBERS, Flags, Frame, pack, parse
from thinwire.frames.layout import DTYPE_NUMBERS, KNOWN_FLAGS, MAX_VALUES, pack_varint, parse_varint

# ---- honest frames

HONEST: list[tuple[Frame, bytes]] = [
    (Frame("3lc", "fp32", (3, 4), (0.5,), 0x0100, b"\x76\xf3"), frame(scales=(0.5,))),
    (
        Frame("mine", "fp64", (300,), (0.1, -2.0), 0x0300, b"xyz"),
        frame(codec=b"\x00\x04mine", flags=0x0300, dtype=4, dims=(b"\xac\x02",), scales=(0.1, -2.0), payload=b"xyz"),
    ),
    (Frame("fp32", "fp16", ()), frame(codec=b"\x01", flags=0, dtype=2, dims=(), scales=(), payload=b"")),
    (Frame("3lc", "fp32", (3, 4), (), 2), frame(flags=2, scales=(), payload=b"")),
    (
        Frame("n" * 255, "fp32", (1,) * 32, (), 0, b"ab"),
        frame(codec=b"\x00\xff" + b"n" * 255, flags=0, dims=(b"\x01",) * 32, scales=(), payload=b"ab"),
    ),
    (Frame("3lc", "fp32", (2**40, 0), (), 0), frame(flags=0, dims=(varint(2**40), b"\0"), scales=(), payload=b"")),
]


def test_handmade_frames_equal_packed_frames() -> None:
    for said, by_hand in HONEST:
        assert pack(said) == by_hand and parse(by_hand) == said, said
    parsed = parse(frame())
    assert (parsed.size, parsed.non_finite, parsed.zstd, parsed.version) == (12, False, False, 1)
    assert parsed.bits_per_value == 16 / 12 and parse(HONEST[3][1]).non_finite
    assert parse(frame(scales=(0.1,))).scales != (0.1,), "four bytes each, but for fp64"


def test_parse_takes_bytes_like_objects_and_copy_false_gives_a_view() -> None:
    data = bytearray(frame())
    assert parse(data) == parse(memoryview(data)) == parse(bytes(data))
    assert isinstance(parse(data).payload, bytes)
    view = parse(data, copy=False)
    assert isinstance(view.payload, memoryview) and view.payload.obj is data and bytes(view.payload) == b"\x76\xf3"
    assert pack(view) == data


# ---- lies, by what a refusal names

LONGER = (b"\x83\x00", b"\x83\x80\x00", b"\x80\x00")
"""Numbers in a longer form than they need."""
OVERFLOWING = (
    (2**40 + 1,),
    (2**20, 2**20, 2),
    (2**32, 2**32),
    (2**62,) * 2,
    (2**62, 2**62, 0),
    (0, 2**41),
    (2**21,) * 32,
)

LIES: dict[str, list[bytes]] = {
    "bytes are too few": [b"", frame()[:8]],
    "begins with b'TW'": [frame(magic=b"WT"), frame(magic=b"\x93N")],
    "version": [frame(version=version) for version in (0, 2, 255)],
    "unknown codec number": [frame(codec=bytes([number])) for number in (max(CODEC_NUMBERS.values()) + 1, 255)],
    "printable ASCII": [frame(codec=b"\x00" + n) for n in (b"\x00", b"\x02\xc3\xa9", b"\x03a\x00b", b"\x03a\nb")],
    "the codec's name": [frame(codec=b"\x00\xff" + b"n" * 9)],
    "has a number and is not sent by name": [frame(codec=b"\x00\x033lc")],
    "unknown flags": [frame(flags=0x0100 | 1 << bit) for bit in (2, 3, 4, 5, 6, 7, 12, 13, 14, 15)],
    "held NaN or Inf": [frame(flags=2), frame(flags=2, scales=()), frame(flags=2, payload=b"")],
    "unknown dtype number": [frame(dtype=number) for number in (0, 5, 255)],
    "is more than 32": [frame(dims=(b"\x01",) * 33), frame(rank=255)],
    "more than 1099511627776 values": [frame(dims=tuple(map(varint, dims))) for dims in OVERFLOWING],
    "dimension 0 at byte 8 is not in its shortest form": [frame(dims=(longer, b"\x04")) for longer in LONGER],
    "the number of scales at byte 10 is not in its shortest form": [frame(num_scales=longer) for longer in LONGER],
    "the payload length at byte 15 is not in its shortest form": [frame(length=longer) for longer in LONGER],
    "dimension 0 at byte 8 is longer than 9 bytes": [frame(dims=(b"\xff" * 10, b"\x04"))],
    "scales are more than 16777216": [frame(num_scales=varint(2**24 + 1)), frame(num_scales=varint(2**62))],
    "ends inside": [frame(num_scales=varint(2**24)), frame(num_scales=b"\x02")],
    "payload is declared as": [
        frame(num_scales=b"\x00"),
        *(frame(length=varint(length)) for length in (0, 1, 3, 127, 2**20, 2**62)),
        *(frame(after=b"\x00"), frame(after=frame())),
    ],
    "a scale is NaN or Inf": [
        frame(dtype=dtype, scales=(*before, scale))
        for dtype in (1, 2, 3, 4)
        for scale in (float("nan"), float("inf"), -float("inf"))
        for before in ((), (1.0, 2.0))
    ],
    "checksum": [frame(checksum=bytes(8)), frame(checksum=frame()[-8:][::-1])],
    ".": [frame(rank=32)],  # dimensions read out of the rest of the frame
}


def refused(data: bytes, named: str = ".") -> None:
    with pytest.raises(tw.FrameError, match=named):
        parse(data)


def test_false_headers_raise_frame_error() -> None:
    for named, lies in LIES.items():
        for lie in lies:
            refused(lie, named)


def test_frames_cut_at_every_byte_and_every_flipped_bit() -> None:
    for data in (frame(), frame(codec=b"\x00\x03abc"), frame(dtype=4), frame(dims=(), scales=())):
        for nbytes in range(len(data)):
            refused(data[:nbytes])
    for bit in range(8 * len(frame())):
        damaged = bytearray(frame())
        damaged[bit // 8] ^= 1 << bit % 8
        refused(bytes(damaged))


def test_false_headers_allocate_no_memory() -> None:
    lies = [
        *(frame(dims=(varint(2**40),)), frame(dims=(varint(2**62),)), frame(num_scales=varint(2**24))),
        *(frame(num_scales=varint(2**62)), frame(length=varint(2**62)), frame(codec=b"\x00\xff")),
    ]
    tracemalloc.start()
    try:
        for lie in lies:
            with contextlib.suppress(tw.FrameError):
                parse(lie)  # the first is honest as far as a parser can tell: it declares, it does not allocate
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16


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
def test_parse_undoes_pack(frame: Frame) -> None:
    assert parse(pack(frame)) == frame


@PLAIN
@given(frames(), st.data())
def test_frame_has_one_canonical_form(frame: Frame, data: st.DataObject) -> None:
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
