"""`qsgd`: stochastic rounding to a few levels, with a norm for each bucket of neighbouring values (QSGD §3.1).

    level = ±floor(a), or one more with probability a − floor(a)      a = |x| / norm · s      decoded = norm · level / s

Unbiased; levels are Elias-gamma coded. Q(·) of DoubleSqueeze §3.2, "randomised quantisation".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Scheme, Step
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Frame
from thinwire.frames.layout import MAX_SCALES
from thinwire.kernels.contract import require_finite_magnitude
from thinwire.kernels.numba.integers import packed_nbytes
from thinwire_lab.kernels.elias import decode_levels, encode_levels, longest
from thinwire_lab.kernels.levels import MAX_LEVELS, bucket_largest, bucket_norms, round_to_levels, value_of_levels

MAX_BUCKET = 1 << 31
_HEAD = struct.Struct("<HI")


@dataclass(frozen=True, kw_only=True)
class QSGD(Scheme):
    """1–4 bits a value and 32 a bucket, unbiased (QSGD; TernGrad §3.3 on buckets).

    The payload is s (2 bytes), the bucket's size (4 bytes), and Elias-gamma coded levels.

    Args:
        levels: s, without the sign and zero: 1 … 16,384.
        bucket: how many neighbouring values share a norm.
        norm: `"l2"` (QSGD's theory, sparse) or `"max"` (QSGD's experiments, finer and longer).
    """

    id: ClassVar[str] = "qsgd"
    checks_finite: ClassVar[bool] = True
    random: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True

    levels: Annotated[int, Between(1, MAX_LEVELS)] = 4
    bucket: Annotated[int, Between(1, MAX_BUCKET)] = 512
    norm: Literal["l2", "max"] = "l2"

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        values = flat.values
        num_buckets = -(-values.size // self.bucket)
        if num_buckets > MAX_SCALES:
            raise ConfigError(f"qsgd: bucket={self.bucket} makes {num_buckets} buckets; {MAX_SCALES} norms fit a frame")
        largest = bucket_largest(values, bucket=self.bucket)
        require_finite_magnitude(float(largest.max()))
        norms = self._norms(values, largest)
        levels = space.array("levels.levels", values.size, np.int16)
        how: dict[str, Any] = {"bucket": self.bucket, "top": self.levels, "natural": False}
        round_to_levels(values, norms=norms, key=step.key, out=levels, **how)
        coded = encode_levels(levels, top=self.levels)
        payload = space.array("levels.payload", _HEAD.size + coded.size, np.uint8)
        payload[: _HEAD.size] = np.frombuffer(_HEAD.pack(self.levels, self.bucket), np.uint8)
        payload[_HEAD.size :] = coded
        return Payload(payload, tuple(norms.tolist()))

    def _norms(self, values: FloatArray, largest: Any) -> Any:
        if self.norm == "max":
            return largest
        norms = bucket_norms(values, bucket=self.bucket, largest=float(largest.max()))
        return np.clip(norms, largest, np.finfo(values.dtype).max).astype(values.dtype)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        top, bucket = _head(frame)
        levels = space.array("levels.levels", out.size, np.int16)
        decode_levels(memoryview(frame.payload)[_HEAD.size :], top=top, out=levels)
        norms = np.array(frame.scales, out.dtype)
        value_of_levels(levels, norms=norms, bucket=bucket, top=top, natural=False, out=out, accumulate=accumulate)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        top, bucket = _head(frame)
        norms = [min(frame.scales), max(frame.scales)]
        coded = 8 * (len(frame.payload) - _HEAD.size) / frame.size
        return {
            "levels": (top, "s: decoded values are norm · level / s, levels -s … s"),
            "bucket": (bucket, "how many neighbouring values share a norm"),
            "norms": (norms, f"the smallest and the largest of {len(frame.scales)}, one for each bucket"),
            "coded bits per value": (coded, "Elias-gamma of |level| + 1, and a sign bit unless the level is 0"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return _HEAD.size + packed_nbytes(frame.size, longest(MAX_LEVELS))

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        _head(frame)
        return _HEAD.size + packed_nbytes(frame.size, 1)


def _head(frame: Frame) -> tuple[int, int]:
    """s and the bucket's size, checked against the number of norms."""
    if len(frame.payload) < _HEAD.size:
        raise FrameError(f"qsgd: the payload begins with {_HEAD.size} bytes, {len(frame.payload)} payload bytes came")
    top, bucket = _HEAD.unpack_from(frame.payload)
    if not 1 <= top <= MAX_LEVELS or not 1 <= bucket <= MAX_BUCKET:
        raise FrameError(f"qsgd: {top} levels in buckets of {bucket} values")
    if len(frame.scales) != -(-frame.size // bucket) or min(frame.scales) < 0:
        raise FrameError(f"qsgd: {len(frame.scales)} norms came for {frame.size} values in buckets of {bucket}")
    return top, bucket
