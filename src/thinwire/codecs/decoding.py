"""Frame → tensor, for any codec, and the sums of what many senders' frames decode to.

Frames are checked first and decoded second, and a receiver may do the two at different times: `CheckedFrame.of` undoes
the zstd stage, and knows that the payload is as long as the shape needs before anything of the shape's size is
allocated. `CheckedFrame.decode` fills a tensor with it; `GradientSums` adds up what came.
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
from thinwire.packets import BatchedTensor

_STUMBLES = (ArithmeticError, LookupError, ValueError, struct.error)
"""What a decoder of elsewhere raises that believes a damaged payload. Of ours, a type that is wrong is wrong here."""


@contextmanager
def _faults_are(frame: Frame) -> Iterator[None]:
    """Within it, what a decoder stumbles over is the frame's fault, which may claim more memory than there is.

    Of many frames that are decoded together, the first one stands for all.
    """
    try:
        yield
    except ThinwireError:
        raise
    except _STUMBLES as error:
        raise FrameError(f"{frame.codec}: the payload cannot be decoded ({type(error).__name__}: {error})") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise FrameError(
            f"{frame.codec}: decoding a tensor of shape {frame.shape} does not fit this machine's memory ({error})"
        ) from error


@dataclass(frozen=True, slots=True)
class CheckedFrame:
    """A frame that was parsed and checked up to its payload's length: what is left is to decode it.

    Args:
        scheme: the class of its codec.
        frame: without the zstd stage; its payload is a view of the bytes that came.
        payload_nbytes: of the payload as it travelled.
        pool: lends the memory to decode with.
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
            raise FrameError("the sender's tensor held NaN or Inf; this frame only says so (frame.non_finite)")
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
        check_out(out, self.frame.shape)
        scheme, frame = self.scheme, self.frame
        if frame.size == 0:
            return
        if off_host(out):
            reason = device.why_not_decoded(scheme, frame, out.device)
            if reason is None:
                with _faults_are(frame):
                    device.decode([device.Received(scheme, frame, out, accumulate)], self.pool)
                return
            if scheme.id not in device.NOTHING_LOST:
                caution(
                    f"{reason}: its frames are decoded on the CPU, and the whole tensor is copied to "
                    f"{out.device.type} (4 bytes a value, where the frame held far fewer)"
                )
        view = direct_view(out)
        with _faults_are(frame), self.pool.lend() as space:
            if view is not None and view.dtype == compute_dtype(frame.dtype):
                scheme.decode(frame, view, accumulate, space)
            else:
                values = space.array("decode.values", frame.size, compute_dtype(frame.dtype))
                scheme.decode(frame, values, False, space)
                store(out, values, accumulate)

    def decode_flat(self, out: FloatArray, *, accumulate: bool) -> None:
        """As `decode`, for the owner of a flat, contiguous float32 array of the frame's size.

        Raises:
            FrameError: the payload is damaged; `out` is untouched.
        """
        if self.frame.dtype == "fp64":
            self.decode(out.reshape(self.frame.shape), accumulate=accumulate)
        elif out.size:
            with _faults_are(self.frame), self.pool.lend() as space:
                self.scheme.decode(self.frame, out, accumulate, space)

    def sent(self) -> Sent:
        """Returns which values the frame holds, for schemes with `sends_some`.

        Raises:
            FrameError: the payload is damaged.
        """
        if self.frame.size == 0:
            return Sent(np.empty(0, np.int64), np.empty(0, compute_dtype(self.frame.dtype)))
        with _faults_are(self.frame), self.pool.lend() as space:
            return self.scheme.sent(self.frame, space)

    def explain(self) -> Explained:
        """Says what the codec's own fields mean; see `Scheme.explain`. Raises FrameError where decoding would."""
        if self.frame.size == 0:  # it has none
            return {}
        with _faults_are(self.frame), self.pool.lend() as space:
            return self.scheme.explain(self.frame, space)


def fill_all(frames: Sequence[CheckedFrame], outs: Sequence[Tensor], accumulate: Sequence[bool]) -> None:
    """Decodes many frames, each into its own tensor; those on a GPU together, by few launches.

    Raises:
        FrameError: a payload is damaged. Its tensor is untouched; others may have changed.
        ConfigError: a tensor does not fit.
    """
    together = []
    for checked, out, adds in zip(frames, outs, accumulate, strict=True):
        frame = checked.frame
        if frame.size and off_host(out) and device.why_not_decoded(checked.scheme, frame, out.device) is None:
            check_out(out, frame.shape)
            together.append(device.Received(checked.scheme, frame, out, adds))
        else:
            checked.decode(out, accumulate=adds)
    if together:
        with _faults_are(together[0].frame):
            device.decode(together, frames[0].pool)


Values: TypeAlias = FloatArray | torch.Tensor
"""Flat values: an array on the host, a tensor on a GPU."""

Gradient: TypeAlias = CheckedFrame | BatchedTensor
"""One sender's gradient of one tensor: a frame that was checked, or values from a batch."""


class GradientSums:
    """Sums of decoded gradients, for both modes: a server's over its workers, an owner's over the other ranks.

    The caller gives the gradients of one sender after the other, in an order that it fixes: floating-point addition is
    not associative, and two runs with one seed must give the same weights.

    Args:
        sums: flat float32 or float64, one for each tensor; filled in place.
        contributions: how many gradients each of them holds already, or all. At 0 the first one overwrites it.

    Example:
        >>> total = GradientSums([np.ones(2, np.float32)], contributions=1)
        >>> total.add([BatchedTensor(np.array([3, 5], np.float32))])
        >>> total.average(2)
        >>> total.sums[0].tolist(), total.contributions
        ([2.0, 3.0], [2])
    """

    __slots__ = ("contributions", "sums")

    def __init__(self, sums: Sequence[Values], contributions: int | Sequence[int] = 0) -> None:
        self.sums = sums
        self.contributions = [contributions] * len(sums) if isinstance(contributions, int) else list(contributions)

    def add(self, gradients: Sequence[Gradient | None]) -> None:
        """Adds one sender's gradients, one for each tensor; None where it has none.

        Raises:
            FrameError: a payload is damaged. Its sum is what it was; those of other tensors may have changed.
        """
        together: list[tuple[CheckedFrame, torch.Tensor, bool]] = []
        on_device: list[int] = []
        for index, (total, gradient) in enumerate(zip(self.sums, gradients, strict=True)):
            if gradient is None:
                continue
            accumulate = self.contributions[index] > 0
            if isinstance(total, torch.Tensor):
                assert isinstance(gradient, CheckedFrame)  # batched tensors are summed on the host
                together.append((gradient, total, accumulate))
                on_device.append(index)
                continue
            if isinstance(gradient, BatchedTensor):
                gradient.unpack(total, accumulate=accumulate)
            else:
                gradient.decode_flat(total, accumulate=accumulate)
            self.contributions[index] += 1
        if together:
            fill_all(*zip(*together, strict=True))
        for index in on_device:
            self.contributions[index] += 1

    def average(self, over: int) -> None:
        """Divides every sum by a number of senders, as a multiplication by its reciprocal in the sum's dtype."""
        if over == 1:
            return
        for total in self.sums:
            factor = (np.float64 if total.itemsize == 8 else np.float32)(1 / over)
            if isinstance(total, torch.Tensor):
                total *= float(factor)
            else:
                total *= factor
