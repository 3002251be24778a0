"""Frame bytes → tensor, for any codec.

Bytes are checked first and decoded second, and a receiver may do the two at different times: `open_frame` parses,
undoes the zstd stage, and knows that the payload is as long as the shape needs before anything of the shape's size is
allocated. `CheckedFrame.decode` fills a tensor with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from thinwire import frames
from thinwire.codecs import device
from thinwire.codecs.scheme import Explained, Scheme
from thinwire.codecs.scratch import ScratchPool
from thinwire.codecs.tensors import FloatArray, check_out, compute_dtype, direct_view, empty, off_host, store
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Flags, Frame
from thinwire.frames.layout import OPTION_MASK

Out = torch.Tensor | NDArray[Any]

_ZSTD, _NON_FINITE = int(Flags.ZSTD), int(Flags.NON_FINITE)  # plain integers: an IntFlag costs ten times as much


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

    def decode(self, out: Out, *, accumulate: bool, threads: int = 1) -> None:
        """Fills `out` in place, or adds into it.

        Raises:
            FrameError: the payload is damaged; `out` is untouched.
            ConfigError: `out` does not fit.
        """
        check_out(out, self.frame.shape)
        self.fill(out, accumulate, threads)

    def decode_flat(self, out: FloatArray, *, accumulate: bool) -> None:
        """As `decode`, for the owner of a flat, contiguous float32 array of the frame's size.

        Raises:
            FrameError: the payload is damaged; `out` is untouched.
        """
        if self.frame.dtype == "fp64":
            self.decode(out.reshape(self.frame.shape), accumulate=accumulate)
        elif out.size:
            with self.pool.lend() as space:
                self.scheme.decode(self.frame, out, accumulate, space)

    def fill(self, out: Out, accumulate: bool, threads: int) -> None:
        """As `decode`, for an `out` that fits."""
        scheme, frame = self.scheme, self.frame
        if frame.size == 0:
            return
        if off_host(out):
            reason = device.why_not_decoded(scheme, frame, out.device)
            if reason is None:
                device.decode(scheme, frame, out, accumulate, self.pool)
                return
            if scheme.id not in device.NOTHING_LOST:
                warnings.warn(
                    f"{reason}: its frames are decoded on the CPU, and the whole tensor is copied to "
                    f"{out.device.type} (4 bytes a value, where the frame held far fewer)",
                    UserWarning,
                    stacklevel=4,  # who called tw.decode
                )
        view = direct_view(out)
        with self.pool.lend(threads) as space:
            if view is not None and view.dtype == compute_dtype(frame.dtype):
                scheme.decode(frame, view, accumulate, space)
            else:
                values = space.array("decode.values", frame.size, compute_dtype(frame.dtype))
                scheme.decode(frame, values, False, space)
                store(out, values, accumulate)

    def explain(self) -> Explained:
        """Says what the codec's own fields mean; see `Scheme.explain`. Raises FrameError where decoding would."""
        with self.pool.lend() as space:
            return self.scheme.explain(self.frame, space)


class Decoder:
    """Decodes the frames of all codecs that it can find.

    Args:
        find: returns the scheme of a codec id; ConfigError where there is none.
        pool: lends the memory to decode with.
    """

    def __init__(self, find: Callable[[str], type[Scheme]], pool: ScratchPool) -> None:
        self._find, self._pool = find, pool

    def decode(
        self,
        frame: bytes | bytearray | memoryview,
        *,
        out: Out | None = None,
        accumulate: bool = False,
        threads: int = 1,
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
        checked = self.open_frame(frame)
        if out is not None:
            checked.decode(out, accumulate=accumulate, threads=threads)
            return out if isinstance(out, torch.Tensor) else torch.from_numpy(out)
        parsed = checked.frame
        try:
            result = empty(parsed.dtype, parsed.shape)
        except (RuntimeError, MemoryError) as error:
            raise FrameError(f"a tensor of shape {parsed.shape} does not fit this machine's memory") from error
        checked.fill(result, False, threads)
        return result

    def open_frame(self, frame: bytes | bytearray | memoryview) -> CheckedFrame:
        """Parses and checks a frame without decoding it.

        Raises:
            FrameError: not a valid frame.
        """
        return self.open_parsed(frames.parse(frame, copy=False))

    def open_parsed(self, parsed: Frame) -> CheckedFrame:
        """As `open_frame`, for receivers that look at the header first, before a zstd stage is undone."""
        try:
            scheme = self._find(parsed.codec)
        except ConfigError as error:
            raise FrameError(f"the frame's codec is not registered here: {error}") from None
        return CheckedFrame(scheme, self._checked(scheme, parsed), len(parsed.payload), self._pool)

    def _checked(self, scheme: type[Scheme], frame: Frame) -> Frame:
        """Undoes the zstd stage and checks the payload's length against the shape, before the shape is allocated."""
        flags = frame.flags
        if flags:
            if flags & _NON_FINITE:
                raise FrameError("the sender's tensor held NaN or Inf; this frame only says so (frame.non_finite)")
            unknown = flags & OPTION_MASK & ~scheme.option_flags
            if unknown:
                raise FrameError(f"{frame.codec}: flags {unknown:#06x} mean nothing to this codec")
        if frame.size == 0:
            if frame.payload or frame.zstd or frame.scales:
                raise FrameError(f"shape {frame.shape} is empty and the payload is not")
            return frame
        most = scheme.max_payload_nbytes(frame)
        if flags & _ZSTD:
            with self._pool.lend() as space:
                data = space.entropy_stage.decompress(frame.payload, most)
            frame = Frame(frame.codec, frame.dtype, frame.shape, frame.scales, flags & ~_ZSTD, data)
        least = scheme.min_payload_nbytes(frame)
        if not least <= len(frame.payload) <= most:
            raise FrameError(
                f"{frame.codec}: shape {frame.shape} takes {least} … {most} payload bytes, {len(frame.payload)} came"
            )
        return frame
