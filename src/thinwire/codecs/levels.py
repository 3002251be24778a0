"""Whole numbers −N … N in ceil(log2(2N + 1)) bits each: `votes`, and the packed form that other schemes may share.

`votes` is the downlink of TernGrad (§3.1). The server's mean of N workers' trits, all of scale s, is s·k / N with a
whole k, so it is sent exactly. Any other tensor is rounded to the nearest of the 2N + 1 levels.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Scheme, Step, finite_magnitude
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray, in_dtype, put
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Frame
from thinwire.kernels.numba.integers import pack_integers, packed_nbytes, unpack_integers

MAX_WORKERS = 1 << 20
"""The float32 mean of more workers no longer distinguishes neighbouring counts."""
SLACK = 1e-5
"""A mean of N values of magnitude s may exceed s by rounding."""


def width_of(top: int) -> int:
    """Returns the bits of a whole number −top … top: ceil(log2(2·top + 1)).

    Example:
        >>> [width_of(n) for n in (1, 2, 4, 8, 64, 512)]
        [2, 3, 4, 5, 8, 11]
    """
    return (2 * top).bit_length()


class Levels(Scheme):
    """The packed form: its scales are the value of level N, and N."""

    num_scales: ClassVar[int] = 2

    @classmethod
    @abstractmethod
    def most(cls, frame: Frame) -> int:
        """The largest N."""

    @classmethod
    def top(cls, frame: Frame) -> int:
        """Returns N. Raises FrameError where it is out of range."""
        top, most = frame.scales[1], cls.most(frame)
        if not 1 <= top <= most or top % 1:
            raise FrameError(f"{frame.codec} sends a scale and a whole number, 1 … {most}; {list(frame.scales)} came")
        return int(top)

    def packed(self, levels: NDArray[Any], scale: float, top: int, space: Scratch) -> Payload:
        """Returns the payload of levels."""
        width = width_of(top)
        words = space.array("levels.words", -(-levels.size * width // 32), np.uint32)
        payload = pack_integers(levels, offset=top, width=width, words=words)
        return Payload(payload, (scale, float(top)), self.flags)

    @classmethod
    def unpacked(cls, frame: Frame, space: Scratch) -> tuple[NDArray[Any], int]:
        """Returns the levels and N. Raises FrameError."""
        top, levels = cls.top(frame), space.array("levels.unpacked", frame.size, np.int32)
        largest = unpack_integers(frame.payload, offset=top, width=width_of(top), out=levels)
        if largest > top:
            raise FrameError(f"{frame.codec}: level {largest} of {top}: the payload is damaged")
        return levels, top

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return packed_nbytes(frame.size, width_of(cls.top(frame)))


@dataclass(frozen=True, kw_only=True)
class Votes(Levels):
    """ceil(log2(2N + 1)) bits a value; error at most s / 2N, and none for means of N trits of scale s.

    Both options may also be given for each step.

    Args:
        workers: N, how many trits were added.
        scale: s, the workers' shared scale; None takes the tensor's largest magnitude.
    """

    id: ClassVar[str] = "votes"
    checks_finite: ClassVar[bool] = True

    workers: Annotated[int, Between(1, MAX_WORKERS)] = 4
    scale: Annotated[float | None, Between(0)] = None

    @property
    def step_options(self) -> frozenset[str]:
        return frozenset({"scale", "workers"})

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        largest = finite_magnitude(flat)
        workers = self.workers if step.workers is None else step.workers
        if workers > MAX_WORKERS:
            raise ConfigError(f"votes: {workers} workers; at most {MAX_WORKERS:,} are possible")
        asked = self.scale if step.scale is None else step.scale
        scale = largest if asked is None else in_dtype("votes: scale", asked, flat.values.dtype)
        if largest > scale * (1 + SLACK):
            raise ConfigError(f"votes: scale={asked!r} is below {largest:g}, the tensor's largest magnitude")
        votes = np.rint(flat.values / np.float64(scale or 1.0) * workers)
        return self.packed(np.clip(votes, -workers, workers).astype(np.int32), scale, workers, space)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        counts, workers = cls.unpacked(frame, space)
        worth = frame.scales[0] * (np.arange(-workers, workers + 1) / workers)
        put(worth.astype(out.dtype)[counts + workers], out, accumulate)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        workers = cls.top(frame)
        return {
            "scale": (frame.scales[0], "s, the workers' shared scale: decoded values are s · k / N"),
            "workers": (workers, "N: votes k are -N … N"),
            "bits per vote": (width_of(workers), "k + N, the first vote in the lowest bits of the first byte"),
        }

    @classmethod
    def most(cls, frame: Frame) -> int:
        return MAX_WORKERS
