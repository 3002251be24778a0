"""`threshold`: all values that reach a magnitude, fixed or found from a sample; the others wait in the residual.

A fixed τ is Strom's and MXNet's, who send ±τ (Wu 2018, §2.3.3). The sampled one is 3LC's "5 % sparsification" (§4.2):
only sampled magnitudes are sorted, and all values at least as large as the sample's k-th are sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Step, finite_magnitude
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.sparse import BITMAP, Sparse
from thinwire.codecs.tensors import Flat, FloatArray, compute_dtype, in_dtype
from thinwire.errors import FrameError
from thinwire.frames import Flags, Frame
from thinwire.kernels.numba.stochastic import sample_of

SIGNS = int(Flags.OPTION_B)  # every value sent is ±scale, one bit each; without it, values in full precision

MIN_SAMPLE = 1000
SAMPLE_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class Threshold(Sparse):
    """1 bit a value of the tensor and 32 a value sent (or 64 a value sent), with a residual.

    Args:
        fraction: how many values the sampled threshold lets through, in (0, 1].
        sample: values to sample, without replacement and always at the same places; None takes 1 %, at least
            1,000. Smaller tensors are looked at whole.
        tau: a fixed threshold instead of a sampled one.
        send: `"values"`, or `"tau"` for ±threshold: one bit instead of 32.
    """

    id: ClassVar[str] = "threshold"
    checks_finite: ClassVar[bool] = True
    option_flags: ClassVar[int] = BITMAP | SIGNS
    num_scales: ClassVar[int | None] = None

    fraction: Annotated[float, Between(0, 1, above=True)] = 0.05
    sample: Annotated[int | None, Between(1)] = None
    tau: Annotated[float | None, Between(0, above=True)] = None
    send: Literal["values", "tau"] = "values"

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        values, signs = flat.values, self.send == "tau"
        self.check_positions(values.size)
        finite_magnitude(flat)
        bound = self._sampled(values) if self.tau is None else self.least(values.dtype)
        reaches = np.abs(values) >= values.dtype.type(bound)
        taken = values[reaches]
        body = np.packbits(taken > 0) if signs else taken.view(np.uint8)
        if self.takes_bitmap(values.size, taken.size, body.size):
            made = self.with_bitmap(np.packbits(reaches), body, space)
        else:
            made = self.with_indices(values.size, np.flatnonzero(reaches), body, space)
        return made._replace(scales=(bound,), flags=made.flags | SIGNS) if signs else made

    @classmethod
    def body_nbytes(cls, frame: Frame, count: int) -> int:
        return -(-count // 8) if frame.flags & SIGNS else super().body_nbytes(frame, count)

    @classmethod
    def values_of(cls, frame: Frame, body: memoryview, count: int) -> FloatArray:
        if len(frame.scales) != (1 if frame.flags & SIGNS else 0) or min(frame.scales, default=0.0) < 0:
            raise FrameError(f"{frame.codec}: scales {list(frame.scales)[:4]} do not belong to these flags")
        if not frame.flags & SIGNS:
            return super().values_of(frame, body, count)
        positive = np.unpackbits(np.frombuffer(body, np.uint8))
        if positive[count:].any():
            raise FrameError(f"{frame.codec}: signs of values behind the last are set")
        scale = compute_dtype(frame.dtype)(frame.scales[0])
        return np.where(positive[:count].view(np.bool_), scale, -scale)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        explained = super().explain(frame, space)
        if frame.flags & SIGNS:
            explained["bits per value sent"] = (1, "OPTION_B: a sign, set where positive")
            explained["tau"] = (frame.scales[0], "the threshold: values sent decode to -tau and tau")
        return explained

    def least(self, dtype: np.dtype[Any]) -> float:
        """The fixed threshold in the type of the values; zeros are not sent even where it rounds to zero."""
        assert self.tau is not None
        return max(in_dtype("threshold: tau", self.tau, dtype), float(np.finfo(dtype).smallest_subnormal))

    def _sampled(self, values: FloatArray) -> float:
        """The magnitude that the given fraction of a sample reaches."""
        magnitudes = np.abs(sample_of(values, self.sample or max(MIN_SAMPLE, math.ceil(SAMPLE_SHARE * values.size))))
        k = max(1, round(self.fraction * magnitudes.size))
        bound = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
        # A sample may hold nothing but zeros; zeros are not sent all the same.
        return float(max(bound, np.finfo(values.dtype).smallest_subnormal))
