"""Frame bytes → tensor, for any codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from thinwire import frames
from thinwire.codecs import registry
from thinwire.codecs.base import Codec, check_payload
from thinwire.codecs.scratch import scratch
from thinwire.codecs.tensors import FloatArray, check_out, compute_dtype, direct_view, empty, off_host, store
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Frame

Out = torch.Tensor | NDArray[Any]


def decode(
    frame: bytes | bytearray | memoryview, *, out: Out | None = None, accumulate: bool = False, threads: int = 1
) -> torch.Tensor:
    """Decodes one frame of any codec.

    Args:
        frame: the bytes of exactly one frame.
        out: filled in place and returned, where given; any floating dtype, of the frame's shape.
        accumulate: adds into `out` instead of overwriting it, without a temporary for contiguous float32.
        threads: how many threads may share one large 3LC tensor, whoever encoded it how; 0 means one for each core.

    Returns:
        A tensor of the encoded shape and dtype on the CPU; or `out`.

    Raises:
        FrameError: not a valid frame; `out` is then untouched.
        ConfigError: `out` does not fit, or `accumulate` without `out`.

    Example:
        >>> import torch, thinwire as tw
        >>> tw.decode(tw.codec("int8").encode(torch.tensor([1.27, -0.5])))
        tensor([ 1.2700, -0.5000])
    """
    if out is None and accumulate:
        raise ConfigError("accumulate=True adds into `out`, and no `out` was given")
    opened = open_frame(frame)
    if out is not None:
        unpack_into(opened, out, accumulate=accumulate, threads=threads)
        return out if isinstance(out, torch.Tensor) else torch.from_numpy(out)
    parsed = opened.frame
    try:
        result = empty(parsed.dtype, parsed.shape)
    except (RuntimeError, MemoryError) as error:
        raise FrameError(f"a tensor of shape {parsed.shape} does not fit this machine's memory") from error
    _unpack(opened.kind, parsed, result, False, threads)
    return result


def decode_into(frame: bytes, out: Out, *, accumulate: bool) -> int:
    """As `decode` with an `out`; returns the payload's size in bytes, for whoever counts."""
    opened = open_frame(frame)
    unpack_into(opened, out, accumulate=accumulate)
    return opened.payload_nbytes


@dataclass(frozen=True, slots=True)
class Opened:
    """A frame that was parsed and checked up to its payload's length: what is left is to unpack it.

    Args:
        kind: the class of its codec.
        frame: without the zstd stage; its payload is a view of the bytes that came.
        payload_nbytes: of the payload as it travelled.
    """

    kind: type[Codec]
    frame: Frame
    payload_nbytes: int


def open_frame(frame: bytes | bytearray | memoryview) -> Opened:
    """Parses and checks a frame without unpacking it, for receivers that check first and decode later.

    Raises:
        FrameError: not a valid frame.
    """
    return open_parsed(frames.parse(frame, copy=False))


def open_parsed(parsed: Frame) -> Opened:
    """As `open_frame`, for receivers that look at the header first, before a zstd stage is undone."""
    kind = _decoder(parsed)
    return Opened(kind, check_payload(kind, parsed), len(parsed.payload))


def unpack_into(opened: Opened, out: Out, *, accumulate: bool, threads: int = 1) -> None:
    """Decodes an opened frame into `out`.

    Raises:
        FrameError: the payload is damaged; `out` is untouched.
        ConfigError: `out` does not fit.
    """
    check_out(out, opened.frame.shape)
    _unpack(opened.kind, opened.frame, out, accumulate, threads)


def unpack_flat(opened: Opened, out: FloatArray, *, accumulate: bool) -> None:
    """As `unpack_into`, for the owner of a flat, contiguous float32 array of the frame's size.

    Raises:
        FrameError: the payload is damaged; `out` is untouched.
    """
    if opened.frame.dtype == "fp64":
        unpack_into(opened, out.reshape(opened.frame.shape), accumulate=accumulate)
    elif out.size:
        with scratch() as space:
            opened.kind.unpack(opened.frame, out, accumulate, space)


def _decoder(frame: Frame) -> type[Codec]:
    try:
        return registry.find(frame.codec)
    except ConfigError:
        raise FrameError(
            f"the frame is of codec {frame.codec!r}, which is not registered here; there are {registry.ids()}"
        ) from None


def _unpack(kind: type[Codec], frame: Frame, out: Out, accumulate: bool, threads: int) -> None:
    if frame.size == 0:
        return
    if off_host(out):
        from thinwire.codecs import device

        if device.unpack(kind, frame, out, accumulate):
            return
    view = direct_view(out)
    with scratch() as space:
        space.threads = threads
        if view is not None and view.dtype == compute_dtype(frame.dtype):
            kind.unpack(frame, view, accumulate, space)
        else:
            values = space.array("decode.values", frame.size, compute_dtype(frame.dtype))
            kind.unpack(frame, values, False, space)
            store(out, values, accumulate)
