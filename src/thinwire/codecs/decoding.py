"""Frame bytes → tensor, for any codec."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from thinwire import frames
from thinwire.codecs import registry
from thinwire.codecs.base import Codec, check_payload
from thinwire.codecs.scratch import scratch
from thinwire.codecs.tensors import check_out, compute_dtype, direct_view, empty, store
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Frame

Out = torch.Tensor | NDArray[Any]


def decode(frame: bytes | bytearray | memoryview, *, out: Out | None = None, accumulate: bool = False) -> torch.Tensor:
    """Decodes one frame of any codec.

    Args:
        frame: the bytes of exactly one frame.
        out: filled in place and returned, where given; any floating dtype, of the frame's shape.
        accumulate: adds into `out` instead of overwriting it, without a temporary for contiguous float32.

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
    parsed = frames.parse(frame, copy=False)
    kind = _decoder(parsed)
    if out is not None:
        _fill(kind, parsed, out, accumulate)
        return out if isinstance(out, torch.Tensor) else torch.from_numpy(out)
    if accumulate:
        raise ConfigError("accumulate=True adds into `out`, and no `out` was given")
    parsed = check_payload(kind, parsed)
    try:
        result = empty(parsed.dtype, parsed.shape)
    except (RuntimeError, MemoryError) as error:
        raise FrameError(f"a tensor of shape {parsed.shape} does not fit this machine's memory") from error
    _unpack(kind, parsed, result, False)
    return result


def decode_into(frame: bytes, out: Out, *, accumulate: bool) -> int:
    """As `decode` with an `out`; returns the payload's size in bytes, for whoever counts."""
    parsed = frames.parse(frame, copy=False)
    _fill(_decoder(parsed), parsed, out, accumulate)
    return len(parsed.payload)


def _fill(kind: type[Codec], parsed: Frame, out: Out, accumulate: bool) -> None:
    check_out(out, parsed.shape)
    _unpack(kind, check_payload(kind, parsed), out, accumulate)


def _decoder(frame: Frame) -> type[Codec]:
    try:
        return registry.find(frame.codec)
    except ConfigError:
        raise FrameError(
            f"the frame is of codec {frame.codec!r}, which is not registered here; there are {registry.ids()}"
        ) from None


def _unpack(kind: type[Codec], frame: Frame, out: Out, accumulate: bool) -> None:
    if frame.size == 0:
        return
    view = direct_view(out)
    with scratch() as space:
        if view is not None and view.dtype == compute_dtype(frame.dtype):
            kind.unpack(frame, view, accumulate, space)
        else:
            values = space.array("decode.values", frame.size, compute_dtype(frame.dtype))
            kind.unpack(frame, values, False, space)
            store(out, values, accumulate)
