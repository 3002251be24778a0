"""Frame → tensor, for any codec.

A receiver checks a frame first and may decode it later. `CheckedFrame.of` undoes the zstd stage, and compares the
payload's length with the shape before it allocates memory of the shape's size. `CheckedFrame.decode` fills a tensor or
adds to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from thinwire.cautions import caution
from thinwire.codecs import device
from thinwire.codecs.scheme import Explained, Scheme, Sent
from thinwire.codecs.scratch import ScratchPool
from thinwire.codecs.tensors import FloatArray, Tensor, check_out, compute_dtype, direct_view, off_host, store
from thinwire.errors import FrameError, ThinwireError
from thinwire.frames import Frame
from thinwire.frames.layout import NON_FINITE, OPTION_MASK, ZSTD

_DECODER_ERRORS = (ArithmeticError, LookupError, ValueError, struct.error)
"""Errors of a plugin's decoder that a damaged payload may cause. Our own decoders raise FrameError for damage."""


@contextmanager
def _as_frame_error(frame: Frame) -> Iterator[None]:
    """Turns a decoder's errors into FrameError; a frame may also claim more memory than the machine has.

    The error names the first of several frames that are decoded together.
    """
    try:
        yield
    except ThinwireError:
        raise
    except _DECODER_ERRORS as error:
        raise FrameError(f"{frame.codec}: the payload cannot be decoded ({type(error).__name__}: {error})") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise FrameError(
            f"{frame.codec}: decoding a tensor of shape {frame.shape} does not fit this machine's memory ({error})"
        ) from error


@dataclass(frozen=True, slots=True)
class CheckedFrame:
    """A parsed frame whose header and payload length were checked: it can be decoded.

    Args:
        scheme: the class of its codec.
        frame: without the zstd stage; its payload is a view of the received bytes.
        payload_nbytes: size of the payload on the wire.
        pool: lends scratch memory.
    """

    scheme: type[Scheme]
    frame: Frame
    payload_nbytes: int
    pool: ScratchPool

    @classmethod
    def of(cls, scheme: type[Scheme], frame: Frame, pool: ScratchPool) -> CheckedFrame:
        """Undoes the zstd stage and checks the payload's length against the shape. Raises FrameError."""
        flags, payload_nbytes = frame.flags, len(frame.payload)
        if flags & NON_FINITE:
            raise FrameError("the sender's tensor held NaN or Inf; this frame has no values (frame.non_finite)")
        if unknown := flags & OPTION_MASK & ~scheme.option_flags:
            raise FrameError(f"{frame.codec}: flags {unknown:#06x} mean nothing to this codec")
        if frame.size == 0:
            if frame.payload or frame.zstd or frame.scales:
                raise FrameError(f"shape {frame.shape} is empty and the payload is not")
            return cls(scheme, frame, payload_nbytes, pool)
        scales, expected = frame.scales, scheme.num_scales
        if expected is not None and (len(scales) != expected or min(scales, default=0.0) < 0):
            raise FrameError(f"{frame.codec} sends {expected} scales of at least 0; {list(scales)[:4]} came")
        most = scheme.max_payload_nbytes(frame)
        if flags & ZSTD:
            with pool.lend() as space:
                data = space.entropy_stage.decompress(frame.payload, most)
            frame = Frame(frame.codec, frame.dtype, frame.shape, scales, flags & ~ZSTD, data)
        least = scheme.min_payload_nbytes(frame)
        if not least <= len(frame.payload) <= most:
            raise FrameError(
                f"{frame.codec}: shape {frame.shape} takes {least} … {most} payload bytes, {len(frame.payload)} came"
            )
        return cls(scheme, frame, payload_nbytes, pool)

    def decode(self, out: Tensor, *, accumulate: bool) -> None:
        """Fills `out` in place, or adds into it.

        Raises:
            FrameError: the payload is damaged; `out` is untouched.
            ConfigError: `out` does not fit.
        """
        fill_all([self], [out], [accumulate])

    def _fill(self, out: Tensor, accumulate: bool) -> None:
        """Decodes on the host into an `out` of the right shape."""
        scheme, frame, view = self.scheme, self.frame, direct_view(out)
        with _as_frame_error(frame), self.pool.lend() as space:
            if view is not None and view.dtype == compute_dtype(frame.dtype):
                scheme.decode(frame, view, accumulate, space)
            else:
                values = space.array("decode.values", frame.size, compute_dtype(frame.dtype))
                scheme.decode(frame, values, False, space)
                store(out, values, accumulate)

    def decode_flat(self, out: FloatArray, *, accumulate: bool) -> None:
        """As `decode`, for a flat, contiguous float32 array of the frame's size.

        Raises:
            FrameError: the payload is damaged; `out` is untouched.
        """
        if self.frame.dtype == "fp64":
            self.decode(out.reshape(self.frame.shape), accumulate=accumulate)
        elif out.size:
            with _as_frame_error(self.frame), self.pool.lend() as space:
                self.scheme.decode(self.frame, out, accumulate, space)

    def sent(self) -> Sent:
        """Returns the positions and values that the frame holds, for schemes with `sends_some`.

        Raises:
            FrameError: the payload is damaged.
        """
        if self.frame.size == 0:
            return Sent(np.empty(0, np.int64), np.empty(0, compute_dtype(self.frame.dtype)))
        with _as_frame_error(self.frame), self.pool.lend() as space:
            return self.scheme.sent(self.frame, space)

    def explain(self) -> Explained:
        """Explains the codec's fields; see `Scheme.explain`. Raises FrameError where decoding would."""
        if self.frame.size == 0:  # has no such fields
            return {}
        with _as_frame_error(self.frame), self.pool.lend() as space:
            return self.scheme.explain(self.frame, space)


def fill_all(frames: Sequence[CheckedFrame], outs: Sequence[Tensor], accumulate: Sequence[bool]) -> None:
    """Decodes many frames, each into its own tensor; for tensors on a GPU, together and with few launches.

    Raises:
        FrameError: a payload is damaged. Its tensor is untouched; others may have changed.
        ConfigError: a tensor does not fit.
    """
    together = []
    for checked, out, adds in zip(frames, outs, accumulate, strict=True):
        scheme, frame = checked.scheme, checked.frame
        check_out(out, frame.shape)
        if frame.size and off_host(out):
            reason = device.why_not_decoded(scheme, frame, out.device)
            if reason is None:
                together.append(device.Received(scheme, frame, out, adds))
                continue
            if scheme.id not in device.UNCOMPRESSED:
                caution(
                    f"{reason}: its frames are decoded on the CPU, and the whole tensor is copied to "
                    f"{out.device.type} (4 bytes a value, where the frame held far fewer)"
                )
        if frame.size:
            checked._fill(out, adds)
    if together:
        with _as_frame_error(together[0].frame):
            device.decode(together, frames[0].pool)


Values: TypeAlias = FloatArray | torch.Tensor
"""Flat values: an array on the host, a tensor on a GPU."""
