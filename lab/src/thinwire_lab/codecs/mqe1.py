"""`mqe1`: one bit a value and two means, with a residual (3LC §4.2, 1-bit SGD).

    v = residual + x        high, low = mean of v where v ≥ 0, mean of the others        decoded = high or low

It has the minimum squared quantisation error: its residual sums to zero over each of the two classes. 3LC takes the
means over a tensor, 1-bit SGD over a column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from thinwire.codecs import Between, Flat, FloatArray, Payload, Scheme, Scratch, Step, finite_magnitude
from thinwire.codecs.scheme import Explained
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Flags, Frame
from thinwire.frames.layout import MAX_RANK, MAX_SCALES
from thinwire.kernels.numba.bits import pack_signs, unpack_signs
from thinwire.kernels.numba.moments import moments

PER_INDEX = int(Flags.OPTION_A)  # two means for each index of one dimension, the payload's first byte


@dataclass(frozen=True, kw_only=True)
class MQE1(Scheme):
    """1 bit a value and two means, with a residual.

    Args:
        axis: None takes two means per tensor (3LC). A dimension's number takes two for each of its indices:
            `axis=1` is a pair per column of a matrix (1-bit SGD, CNTK). Negative numbers count from the last
            dimension. Tensors without that dimension (biases) take one pair, and their frames say so.
    """

    id: ClassVar[str] = "mqe1"
    checks_finite: ClassVar[bool] = True
    keeps_residual: ClassVar[bool] = True
    option_flags: ClassVar[int] = PER_INDEX

    axis: Annotated[int | None, Between(-MAX_RANK, MAX_RANK - 1)] = None

    def fuses_residual(self, shape: tuple[int, ...]) -> bool:
        return self._axis_of(shape) is None

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        axis = self._axis_of(flat.shape)
        return self._of_tensor(flat, step, space) if axis is None else self._of_axis(flat, axis, space)

    def _axis_of(self, shape: tuple[int, ...]) -> int | None:
        if self.axis is None or not -len(shape) <= self.axis < len(shape):
            return None
        return self.axis % len(shape)

    def _of_tensor(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        values = flat.values
        sums = moments(values, residual=step.residual, residual_scale=step.residual_scale, squares=False)
        kind = values.dtype.type
        num_negative = values.size - sums.num_nonnegative
        high = float(kind(sums.positive / max(1, sums.num_nonnegative) * sums.unit))
        low = float(kind(sums.negative / max(1, num_negative) * sums.unit))
        high, low = min(high, sums.largest), max(low, -sums.largest)
        bits = space.array("mqe1.bits", -(-values.size // 8), np.uint8)
        kept, factor = step.residual, step.residual_scale
        pack_signs(values, bits=bits, residual=kept, residual_scale=factor, low=low, high=high)
        return Payload(bits, (low, high))

    def _of_axis(self, flat: Flat, axis: int, space: Scratch) -> Payload:
        """Column means in plain NumPy, in float64, in units that cannot overflow."""
        if 2 * flat.shape[axis] > MAX_SCALES:
            raise ConfigError(f"mqe1: axis {axis} of shape {flat.shape} takes more than {MAX_SCALES} scales")
        largest = finite_magnitude(flat)
        unit = 2.0 ** min(max(math.frexp(largest)[1], -1000), 1000)
        cube = flat.values.reshape(_cube(flat.shape, axis)).astype(np.float64) / unit
        up = cube >= 0
        num_up = np.maximum(1, up.sum(axis=(0, 2)))
        num_down = np.maximum(1, (~up).sum(axis=(0, 2)))
        kind = flat.values.dtype.type
        high = ((cube * up).sum(axis=(0, 2)) / num_up * unit).clip(0, largest).astype(kind)
        low = ((cube * ~up).sum(axis=(0, 2)) / num_down * unit).clip(-largest, 0).astype(kind)
        payload = space.array("mqe1.payload", 1 - (-flat.values.size // 8), np.uint8)
        payload[0] = axis
        pack_signs(flat.values, bits=payload[1:])
        return Payload(payload, tuple(np.stack((low, high), axis=1).reshape(-1).tolist()), PER_INDEX)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        payload = np.frombuffer(frame.payload, np.uint8)
        axis = None
        if frame.flags & PER_INDEX:
            axis, payload = int(payload[0]), payload[1:]
            if axis >= len(frame.shape):
                raise FrameError(f"mqe1: means along dimension {axis} of shape {frame.shape}")
        expected = 2 if axis is None else 2 * frame.shape[axis]
        if len(frame.scales) != expected:
            raise FrameError(f"mqe1 sends {expected} means for shape {frame.shape}, {len(frame.scales)} came")
        means: Any = np.array(frame.scales, out.dtype).reshape(-1, 2)
        if np.any(means[:, 0] > 0) or np.any(means[:, 1] < 0):
            raise FrameError("mqe1: the mean of negative values is positive, or the other way round")
        if axis is None:
            unpack_signs(payload, low=means[0, 0], high=means[0, 1], out=out, accumulate=accumulate)
            return
        cube = _cube(frame.shape, axis)
        up = np.unpackbits(payload, count=out.size).view(np.bool_).reshape(cube)
        target = out.reshape(cube)
        values = np.where(up, means[:, 1][:, None], means[:, 0][:, None])
        if accumulate:
            target += values
        else:
            target[:] = values

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        axis = frame.payload[0] if frame.flags & PER_INDEX else None
        means = [list(frame.scales[i : i + 2]) for i in range(0, min(len(frame.scales), 8), 2)]
        return {
            "means": (means, "low and high: of the values below zero, and of the others; the first four pairs"),
            "pairs of means": (len(frame.scales) // 2, "one for the tensor, or for each index of a dimension"),
            "axis": (axis, "OPTION_A: the dimension with two means for each index, in the first byte"),
            "bits": ("high where set", "one bit a value, the first in the highest bit of its byte"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return -(-frame.size // 8) + (1 if frame.flags & PER_INDEX else 0)


def _cube(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """The shape as (before, axis, behind)."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
