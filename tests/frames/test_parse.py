"""Every lie that a frame's header can tell, one test each."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import pytest

import thinwire as tw
from tests.frames.bytes_of import frame, varint
from thinwire.frames import CODEC_NUMBERS, parse


def refused(data: bytes, message: str) -> None:
    with pytest.raises(tw.FrameError, match=message):
        parse(data)


def test_the_frame_that_the_lies_start_from() -> None:
    parsed = parse(frame())
    assert (parsed.codec, parsed.dtype, parsed.shape, parsed.flags, parsed.payload) == (
        "3lc",
        "fp32",
        (3, 4),
        0x0100,
        b"\x76\xf3",
    )
    assert list(parsed.scales) == pytest.approx([0.7])
    assert (parsed.size, parsed.non_finite, parsed.zstd, parsed.version) == (12, False, False, 1)
    assert parsed.bits_per_value == 16 / 12


def test_any_bytes_like_object_is_taken() -> None:
    data = frame()
    assert parse(bytearray(data)) == parse(memoryview(data)) == parse(data)
    assert isinstance(parse(data).payload, bytes)


def test_without_a_copy_the_payload_is_a_view() -> None:
    data = bytearray(frame())
    parsed = parse(data, copy=False)
    assert isinstance(parsed.payload, memoryview)
    assert bytes(parsed.payload) == b"\x76\xf3"
    assert parsed.payload.obj is data


def test_too_short() -> None:
    for nbytes in range(18):
        refused(frame()[:nbytes], "too few|ends inside|declared|checksum")
    refused(b"", "0 bytes are too few")


def test_cut_at_every_byte() -> None:
    for data in (frame(), frame(codec=b"\x00\x03abc"), frame(dtype=4), frame(dims=(), scales=())):
        for nbytes in range(len(data)):
            refused(data[:nbytes], ".")


def test_every_flipped_bit_is_found() -> None:
    data = frame()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        refused(bytes(damaged), ".")


def test_magic_and_version() -> None:
    refused(frame(magic=b"WT"), r"begins with b'TW', these bytes with b'WT'")
    refused(frame(magic=b"\x93N"), "begins with")
    for version in (0, 2, 255):
        refused(frame(version=version), f"version {version}; this thinwire reads version 1")


def test_unknown_codec() -> None:
    for number in (max(CODEC_NUMBERS.values()) + 1, 255):
        refused(frame(codec=bytes([number])), f"unknown codec number {number}")


def test_names() -> None:
    assert parse(frame(codec=b"\x00\x04mine")).codec == "mine"
    assert parse(frame(codec=b"\x00\xff" + b"n" * 255)).codec == "n" * 255
    refused(frame(codec=b"\x00\x00"), "printable ASCII, not b''")
    refused(frame(codec=b"\x00\x02\xc3\xa9"), "printable ASCII")
    refused(frame(codec=b"\x00\x03a\x00b"), "printable ASCII")
    refused(frame(codec=b"\x00\x03a\nb"), "printable ASCII")
    refused(frame(codec=b"\x00\xff" + b"n" * 9), "ends inside the codec's name")
    refused(frame(codec=b"\x00\x033lc"), "has a number of its own")


def test_unknown_flags() -> None:
    for flag in (0x0004, 0x0008, 0x0010, 0x0020, 0x0040, 0x0080, 0x1000, 0x2000, 0x4000, 0x8000):
        refused(frame(flags=0x0100 | flag), f"unknown flags {flag:#06x}")


def test_a_frame_that_only_says_not_finite() -> None:
    assert parse(frame(flags=0x0002, scales=(), payload=b"")).non_finite
    for held, has in (
        ({}, "1 scales and a payload of 2 bytes"),
        ({"scales": ()}, "0 scales and a payload of 2 bytes"),
        ({"payload": b""}, "1 scales and a payload of 0 bytes"),
    ):
        refused(frame(flags=0x0002, **held), f"held NaN or Inf, .*: {has} came")


def test_unknown_dtype() -> None:
    for number in (0, 5, 255):
        refused(frame(dtype=number), f"unknown dtype number {number}")


def test_rank() -> None:
    assert parse(frame(dims=(b"\x01",) * 32)).shape == (1,) * 32
    refused(frame(dims=(b"\x01",) * 33), "rank 33 is more than 32")
    refused(frame(rank=255), "rank 255 is more than 32")
    refused(frame(rank=32), "ends inside|shortest|declared|longer")  # dimensions read out of the rest of the frame


@pytest.mark.parametrize(
    "dims",
    [
        (2**40 + 1,),
        (2**20, 2**20, 2),
        (2**32, 2**32),
        (2**62, 2**62),
        (2**62, 2**62, 0),
        (0, 2**41),
        (2**21,) * 32,
    ],
    ids=str,
)
def test_dimensions_that_overflow(dims: tuple[int, ...]) -> None:
    refused(frame(dims=tuple(map(varint, dims))), "more than 1099511627776 values")


def test_the_largest_dimensions() -> None:
    assert parse(frame(dims=(varint(2**40), b"\x00"))).shape == (2**40, 0)
    assert parse(frame(dims=(varint(2**40),))).size == 2**40


@pytest.mark.parametrize("longer", [b"\x83\x00", b"\x83\x80\x00", b"\x80\x00"])
def test_varints_that_are_not_canonical(longer: bytes) -> None:
    refused(frame(dims=(longer, b"\x04")), "dimension 0 at byte 8 is not in its shortest form")
    refused(frame(num_scales=longer), "the number of scales at byte 10 is not in its shortest form")
    refused(frame(length=longer), "the payload length at byte 15 is not in its shortest form")
    endless = b"\xff" * 10
    refused(frame(dims=(endless, b"\x04")), "dimension 0 at byte 8 is longer than 9 bytes")


def test_number_of_scales() -> None:
    refused(frame(num_scales=varint(2**24 + 1)), "16777217 scales are more than 16777216")
    refused(frame(num_scales=varint(2**24)), "ends inside 16777216 scales")
    refused(frame(num_scales=varint(2**62)), "scales are more than")
    refused(frame(num_scales=b"\x02"), "ends inside 2 scales")
    refused(frame(num_scales=b"\x00"), "payload is declared as")


@pytest.mark.parametrize("dtype", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_scales_that_are_not_finite(dtype: int, scale: float) -> None:
    refused(frame(dtype=dtype, scales=(scale,)), "a scale is NaN or Inf")
    refused(frame(dtype=dtype, scales=(1.0, 2.0, scale)), "a scale is NaN or Inf")


def test_scales_of_fp64_are_eight_bytes() -> None:
    assert parse(frame(dtype=4, scales=(0.1,))).scales == (0.1,)
    assert parse(frame(dtype=1, scales=(0.1,))).scales != (0.1,)


@pytest.mark.parametrize("length", [0, 1, 3, 127, 2**20, 2**62])
def test_payload_length(length: int) -> None:
    refused(frame(length=varint(length)), f"declared as {length} bytes and")


def test_trailing_bytes() -> None:
    refused(frame(after=b"\x00"), "declared as 2 bytes and 3 came")
    refused(frame(after=frame()), "declared as 2 bytes")


def test_checksum() -> None:
    refused(frame(checksum=bytes(8)), "checksum 0x.* found, 0x0000000000000000 stated")
    refused(frame(checksum=frame()[-8:][::-1]), "damaged on its way")


def test_nothing_is_allocated_for_a_lie() -> None:
    lies = [
        frame(dims=(varint(2**40),)),
        frame(dims=(varint(2**62),)),
        frame(num_scales=varint(2**24)),
        frame(num_scales=varint(2**62)),
        frame(length=varint(2**62)),
        frame(codec=b"\x00\xff"),
    ]
    tracemalloc.start()
    try:
        for lie in lies:
            try:
                parse(lie)  # the first is honest as far as a parser can tell: it declares, it does not allocate
            except tw.FrameError:
                continue
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16


def test_parsing_needs_no_torch() -> None:
    code = (
        "import sys, thinwire as tw\n"
        f"frame = tw.frames.parse(bytes.fromhex('{frame().hex()}'))\n"
        "assert (frame.codec, frame.shape, frame.dtype, frame.payload) == ('3lc', (3, 4), 'fp32', b'\\x76\\xf3')\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
