"""`votes`: the downlink of TernGrad (§3.1): whole numbers −N … N in ceil(log2(2N + 1)) bits, decoded to s·k / N.

The server's mean of N workers' trits, all of scale s, is s·k / N with a whole k; so nothing is lost. Any other tensor
is rounded to the nearest of the 2N + 1 levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.codecs.scheme import Explained, Payload, Scheme, Step
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Frame
from thinwire.kernels.contract import require_finite_magnitude
from thinwire.kernels.numba.integers import pack_integers, packed_nbytes, unpack_integers
from thinwire.kernels.numba.jit import max_magnitude
from thinwire.kernels.numba.rounding import round_to_integers, scale_integers

MAX_WORKERS = 1 << 20
"""A float32 mean of more than this does not tell neighbouring counts apart any more."""
SLACK = 1e-5
"""A mean of N values of magnitude s may exceed s by rounding."""


@dataclass(frozen=True, kw_only=True)
class Votes(Scheme):
    """ceil(log2(2N + 1)) bits a value; error at most s / 2N, and none for means of N trits of scale s.

    Both options may be said of each step instead.

    Args:
        workers: N, how many trits were added.
        scale: s, the workers' shared scale; None takes the tensor's largest magnitude.
    """

    id: ClassVar[str] = "votes"

    workers: int = 4
    scale: float | None = None

    def __post_init__(self) -> None:
        self.check_number("workers", 1, MAX_WORKERS, whole=True)
        self.check_number("scale", 0, optional=True)

    @property
    def step_options(self) -> frozenset[str]:
        return frozenset({"scale", "workers"})

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        size = flat.values.size
        largest = max_magnitude(flat.values)
        require_finite_magnitude(largest)
        workers = self.workers if step.workers is None else step.workers
        asked = self.scale if step.scale is None else step.scale
        scale = largest if asked is None else float(flat.values.dtype.type(asked))
        if largest > scale * (1 + SLACK):
            raise ConfigError(f"votes: scale={asked!r} is below {largest:g}, the tensor's largest magnitude")
        counts = space.array("votes.counts", size, np.int32)
        if scale == 0:
            counts[:] = 0
        else:
            round_to_integers(flat.values, scale=scale, top=workers, out=counts)
        width = width_of(workers)
        words = space.array("votes.words", -(-size * width // 32), np.uint32)
        payload = pack_integers(counts, offset=workers, width=width, words=words)
        return Payload(payload, (scale, float(workers)))

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        workers = _workers(frame)
        counts = space.array("votes.counts", out.size, np.int32)
        largest = unpack_integers(frame.payload, offset=workers, width=width_of(workers), out=counts)
        if largest > workers:
            raise FrameError(f"votes: {largest} votes of {workers} workers: the payload is damaged")
        scale_integers(counts, scale=frame.scales[0], top=workers, out=out, accumulate=accumulate)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        workers = _workers(frame)
        return {
            "scale": (frame.scales[0], "s, what all workers' votes are worth: decoded values are s · k / N"),
            "workers": (workers, "N: votes k are -N … N"),
            "bits per vote": (width_of(workers), "k + N, the first vote in the lowest bits of the first byte"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return packed_nbytes(frame.size, width_of(_workers(frame)))


def width_of(top: int) -> int:
    """Bits that tell −top … top apart: ceil(log2(2·top + 1)).

    Example:
        >>> [width_of(n) for n in (1, 2, 4, 8, 64, 512)]
        [2, 3, 4, 5, 8, 11]
    """
    return (2 * top).bit_length()


def _workers(frame: Frame) -> int:
    scales = frame.scales
    if len(scales) != 2 or scales[0] < 0 or not 1 <= scales[1] <= MAX_WORKERS or scales[1] % 1:
        raise FrameError(
            f"votes sends a scale of at least 0 and a number of workers, 1 … {MAX_WORKERS}; {list(scales)[:4]} came"
        )
    return int(scales[1])
