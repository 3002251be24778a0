"""Frame ↔ bytes.

`pack` does not check values, because only our codecs call it. `parse` takes untrusted bytes: it checks every number
before use, allocates no more than the received bytes, and raises `FrameError` for any fault. The codec checks that the
payload fits the shape before `thinwire.decode` allocates the tensor.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable

import xxhash

from thinwire.errors import FrameError
from thinwire.frames.layout import (
    CHECKSUM_NBYTES,
    CODEC_NUMBERS,
    DTYPE_NUMBERS,
    KNOWN_FLAGS,
    MAGIC,
    MAX_RANK,
    MAX_SCALES,
    MAX_VALUES,
    NAMED_CODEC,
    NON_FINITE,
    VERSION,
    Frame,
    pack_varint,
    parse_varint,
)

_CODECS = {number: name for name, number in CODEC_NUMBERS.items()}
_DTYPES = {number: name for name, number in DTYPE_NUMBERS.items()}
_FIXED_NBYTES = 8
_TENSORS = 4096
"""Heads in each cache: all frames of a tensor have the same head, which is half of a small frame's cost."""


def pack(frame: Frame) -> bytes:
    """Returns the frame's bytes.

    >>> frame = Frame(codec="fp32", dtype="fp32", shape=(1,), payload=b"abcd")
    >>> parse(pack(frame)) == frame
    True
    """
    return write(frame.codec, frame.dtype, frame.shape, frame.scales, frame.flags, frame.payload, frame.version)


def write(
    codec: str,
    dtype: str,
    shape: tuple[int, ...],
    scales: tuple[float, ...],
    flags: int,
    payload: bytes | memoryview,
    version: int = VERSION,
) -> bytes:
    """As `pack`, of a frame's fields, for senders without a `Frame`."""
    before_scales, pack_scales = _beginning(version, codec, flags, dtype, shape, len(scales))
    begin = before_scales + pack_scales(*scales) + pack_varint(len(payload))
    checksum = xxhash.xxh3_64(begin)
    checksum.update(payload)
    return b"".join((begin, payload, checksum.digest()[::-1]))  # xxhash gives the canonical form, big-endian


@functools.lru_cache(_TENSORS)
def head(version: int, codec: str, flags: int, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Returns a frame's bytes before the scales: the same in every frame of one tensor."""
    number = CODEC_NUMBERS.get(codec, NAMED_CODEC)
    head = bytearray(MAGIC)
    head += bytes((version, number))
    if number == NAMED_CODEC:
        name = codec.encode("ascii")
        head.append(len(name))
        head += name
    head += struct.pack("<HBB", flags, DTYPE_NUMBERS[dtype], len(shape))
    for dim in shape:
        head += pack_varint(dim)
    return bytes(head)


@functools.lru_cache(_TENSORS)
def _beginning(
    version: int, codec: str, flags: int, dtype: str, shape: tuple[int, ...], num_scales: int
) -> tuple[bytes, Callable[..., bytes]]:
    """Returns a frame's bytes before the scales, their number included, and the struct that packs the scales."""
    before = head(version, codec, flags, dtype, shape) + pack_varint(num_scales)
    return before, _scales_form(num_scales, dtype).pack


@functools.lru_cache(_TENSORS)
def _scales_form(count: int, dtype: str) -> struct.Struct:
    return struct.Struct(f"<{count}{'d' if dtype == 'fp64' else 'f'}")


def with_checksum(data: bytes | memoryview) -> bytes:
    """Returns the frame of the bytes before its checksum."""
    return b"".join((data, xxhash.xxh3_64_digest(data)[::-1]))


def without_checksum(data: bytes | memoryview) -> bytes | memoryview:
    """Returns the bytes before a frame's checksum; empty where the checksum is wrong.

    >>> frame = with_checksum(b"abcd")
    >>> without_checksum(frame), without_checksum(b"x" + frame)
    (b'abcd', b'')
    """
    end = len(data) - CHECKSUM_NBYTES
    if end > 0 and xxhash.xxh3_64_digest(data[:end])[::-1] == data[end:]:
        return data[:end]
    return b""


def parse(data: bytes | bytearray | memoryview, *, copy: bool = True) -> Frame:
    """Reads one frame.

    Args:
        data: exactly one frame.
        copy: True copies the payload (`bytes`); False returns a view into `data`, which must then stay unchanged.

    Raises:
        FrameError: `data` is not exactly one valid frame of version 1.

    Example:
        >>> import torch, thinwire as tw
        >>> frame = parse(tw.codec("fp16").encode(torch.ones(2, 3)))
        >>> frame.codec, frame.dtype, frame.shape, len(frame.payload)
        ('fp16', 'fp32', (2, 3), 12)
    """
    view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
    end = len(view) - CHECKSUM_NBYTES
    if end < _FIXED_NBYTES + 2:
        raise FrameError(f"{len(view)} bytes are too few for a frame")
    if view[:2] != MAGIC:
        raise FrameError(f"a frame begins with {MAGIC!r}, these bytes with {bytes(view[:2])!r}")
    if view[2] != VERSION:
        raise FrameError(f"frame version {view[2]}; this thinwire reads version {VERSION}")
    at = _end_of_head(view, end)
    codec, flags, dtype, shape = _read_head(bytes(view[:at]))
    num_scales, scales_at = parse_varint(view, at, "the number of scales")
    at = scales_at + num_scales * (8 if dtype == "fp64" else 4)
    if num_scales > MAX_SCALES:
        raise FrameError(f"{num_scales} scales are more than {MAX_SCALES}")
    if num_scales and at > end:
        need, left = at - scales_at, max(0, end - scales_at)
        raise FrameError(f"the frame ends inside {num_scales} scales: {need} bytes needed, {left} left")
    length, at = parse_varint(view, at, "the payload length")
    if length != end - at:
        raise FrameError(f"the payload is declared as {length} bytes and {end - at} came")
    payload = view[at:end]
    stated, found = int.from_bytes(view[end:], "little"), xxhash.xxh3_64_intdigest(view[:end])
    if stated != found:
        raise FrameError(f"checksum {found:#018x} found, {stated:#018x} stated: the frame was damaged on its way")
    if flags & NON_FINITE and (num_scales or length):
        raise FrameError(
            "the frame says that its tensor held NaN or Inf, and must then have no scales and no payload: "
            f"{num_scales} scales and a payload of {length} bytes came"
        )
    # Only after these checks: as objects, scales take eight times the bytes.
    scales = _scales_form(num_scales, dtype).unpack_from(view, scales_at) if num_scales else ()
    if not all(map(math.isfinite, scales)):
        raise FrameError("a scale is NaN or Inf")
    return Frame(codec, dtype, shape, scales, flags, bytes(payload) if copy else payload, VERSION)


def _end_of_head(view: memoryview, end: int) -> int:
    """Returns the offset of the scales, if this is a frame; `_read_head` checks the head's content."""
    at = 4 if view[3] != NAMED_CODEC else 5 + view[4]
    at += 4
    if at > end:
        what = "the flags" if view[3] != NAMED_CODEC or at - 4 <= end else "the codec's name"
        raise FrameError(f"the frame ends inside {what}: {at} bytes needed, {end} came")
    rank = view[at - 1]
    if rank > MAX_RANK:
        raise FrameError(f"rank {rank} is more than {MAX_RANK}")
    for axis in range(rank):
        if at < end and view[at] < 0x80:  # one byte; most dimensions do not need `parse_varint`
            at += 1
            continue
        _, at = parse_varint(view, at, f"dimension {axis}")
        if at > end:
            raise FrameError(f"the frame ends inside dimension {axis}")
    return at


@functools.lru_cache(_TENSORS)
def _read_head(head: bytes) -> tuple[str, int, str, tuple[int, ...]]:
    """Returns codec, flags, dtype and shape. The cache keeps only valid heads."""
    view = memoryview(head)
    codec, at = _read_codec(view)
    flags, dtype_number, rank = struct.unpack_from("<HBB", view, at)
    at += 4
    if flags & ~KNOWN_FLAGS:
        raise FrameError(f"unknown flags {flags & ~KNOWN_FLAGS:#06x}: the frame comes from a newer thinwire")
    if dtype_number not in _DTYPES:
        raise FrameError(f"unknown dtype number {dtype_number}; version {VERSION} has {sorted(_DTYPES)}")
    dims = []
    for axis in range(rank):
        dim, at = parse_varint(view, at, f"dimension {axis}")
        dims.append(dim)
    # Zeros are left out of the product: they would hide strides that overflow, as in (2**62, 2**62, 0).
    if math.prod(filter(None, dims)) > MAX_VALUES:
        raise FrameError(f"shape {tuple(dims)} has more than {MAX_VALUES} values")
    return codec, flags, _DTYPES[dtype_number], tuple(dims)


def _read_codec(head: memoryview) -> tuple[str, int]:
    number = head[3]
    if number != NAMED_CODEC:
        if number not in _CODECS:
            raise FrameError(f"unknown codec number {number}; version {VERSION} has 0 … {max(_CODECS)}")
        return _CODECS[number], 4
    length = head[4]
    raw = bytes(head[5 : 5 + length])
    name = raw.decode("ascii", "replace")
    if not raw.isascii() or not name.isprintable() or not name:
        raise FrameError(f"a codec's name is printable ASCII, not {raw!r}")
    if name in CODEC_NUMBERS:
        raise FrameError(f"codec {name!r} has a number and is not sent by name")
    return name, 5 + length
