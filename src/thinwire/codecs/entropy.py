"""`entropy`: bins as fine as a layer's entropy requires, Huffman coded (Øland & Raj, algorithms 1 and 2).

    N = ceil(H + c)        i = floor(2**N·(w − lo)/(hi − lo))        decoded = lo + (hi − lo)·(i + 0.5)/2**N

H is the entropy of a sample in 2**M bins. The paper compresses weights before they are averaged; gradients and deltas
may be sent too. Every frame is self-contained. Instead of 2**N probabilities it holds the lengths of canonical codes.

The payload is N (1 byte), then either N bits a value, or with `HUFFMAN`: code lengths, the sizes of the first three
streams (varints), and four streams. A constant tensor has lo = hi and zeros, one per 4,096 values.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Scheme, Step
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.sparse import VALUES_PER_BYTE
from thinwire.codecs.tensors import Flat, FloatArray, put
from thinwire.errors import FrameError
from thinwire.frames import Flags, Frame
from thinwire.frames.layout import pack_varint, parse_varint
from thinwire.kernels.contract import require_finite_magnitude
from thinwire.kernels.numba.huffman import (
    MAX_BITS,
    NUM_STREAMS,
    code_lengths,
    decode_symbols,
    encode_symbols,
    length_limit,
    read_lengths,
    room_nbytes,
    write_lengths,
)
from thinwire.kernels.numba.integers import pack_integers, packed_nbytes, unpack_integers
from thinwire.kernels.numba.moments import moments
from thinwire.kernels.numba.stochastic import sample_of

HUFFMAN = int(Flags.OPTION_A)
"""Bins are Huffman coded; without it, N bits each."""

MOST_BITS = 16
MOST_FIXED_BITS = 30
MIN_SAMPLE = 1000
"""A share of a small layer shows too little: 3 % of 500 weights cannot show more than 3.9 bits."""
PRESETS = {"accuracy": 6.0, "size": 5.0}


@dataclass(frozen=True, kw_only=True)
class Entropy(Scheme):
    """About H + 0…2 bits a value for a layer whose bins have entropy H; error at most half a bin.

    Args:
        preset: `"accuracy"` is c = 6 (§4: no loss), `"size"` is c = 5 (§5.1: smaller, a slight loss).
        c: bits above the entropy, instead of the preset's.
        mode: `"entropy"` takes N = H + c; `"rms"` N = log2(G + 1) + c with G the root mean square of the gradient
            (§3.2); `"fixed"` takes `bits` and packs without Huffman (§3.1).
        sample: F, the share of the weights whose entropy is taken; at least 1,000 weights, or all.
        histogram_bits: M, the bins of that entropy: 0 … 10; 0 takes N = c.
        rounding: `"ceil"` or `"round"`, of N.
        bits: N of the fixed mode, 1 … 30.
        gradient_rms: G for every tensor. None takes `encode`'s argument `rms`, which workers pass when they send
            weights, or without it the RMS of the tensor itself, which is right for gradients.
    """

    id: ClassVar[str] = "entropy"
    checks_finite: ClassVar[bool] = True
    option_flags: ClassVar[int] = HUFFMAN

    preset: Literal["accuracy", "size"] = "accuracy"
    c: Annotated[float | None, Between(0, MOST_BITS)] = None
    mode: Literal["entropy", "rms", "fixed"] = "entropy"
    sample: Annotated[float, Between(0, 1)] = 0.03
    histogram_bits: Annotated[int, Between(0, 10)] = 4
    rounding: Literal["ceil", "round"] = "ceil"
    bits: Annotated[int, Between(1, MOST_FIXED_BITS)] = 8
    gradient_rms: Annotated[float | None, Between(0)] = None

    @property
    def step_options(self) -> frozenset[str]:
        return frozenset({"rms"}) if self.mode == "rms" and self.gradient_rms is None else frozenset()

    def num_bits(self, values: FloatArray, rms: float | None = None) -> int:
        """Returns N for a flat layer of finite values that are not all equal; `rms` is G, if known."""
        if self.mode == "fixed":
            return self.bits
        c = PRESETS[self.preset] if self.c is None else self.c
        if self.mode == "rms":
            target = math.log2(self._gradient_rms(values, rms) + 1) + c
        else:
            sample = sample_of(values, max(MIN_SAMPLE, math.ceil(self.sample * values.size)))
            low, high = float(values.min()), float(values.max())
            target = entropy_of(bin_values(sample, low=low, high=high, num_bits=self.histogram_bits)) + c
        # Rounding may leave an entropy of whole bits an ulp too high, which must not cost another bit.
        num_bits = math.ceil(target - 1e-9) if self.rounding == "ceil" else round(target)
        return min(max(1, num_bits), MOST_BITS)

    def _gradient_rms(self, values: FloatArray, rms: float | None) -> float:
        if self.gradient_rms is not None:
            return self.gradient_rms
        if rms is not None:
            return rms
        sums = moments(values, signed=False)
        return math.sqrt(sums.squares / values.size) * sums.unit

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        values = flat.values
        low, high = float(values.min()), float(values.max())
        require_finite_magnitude(max(abs(low), abs(high)) if low <= high else math.nan)
        if low == high:
            payload = space.array("entropy.payload", values.size // VALUES_PER_BYTE, np.uint8)
            payload.fill(0)
            return Payload(payload, (low, high))
        num_bits = self.num_bits(values, step.rms)
        bins = bin_values(values, low=low, high=high, num_bits=num_bits)
        coded = None if self.mode == "fixed" or num_bits > MAX_BITS else _code(bins, num_bits, space)
        raw_nbytes = 1 + packed_nbytes(values.size, num_bits)
        if coded is not None and 1 + len(coded) < raw_nbytes:
            return Payload(bytes((num_bits,)) + coded, (low, high), HUFFMAN)
        words = space.array("entropy.words", -(-values.size * num_bits // 32), np.uint32)
        payload = space.array("entropy.payload", raw_nbytes, np.uint8)
        payload[0] = num_bits
        payload[1:] = pack_integers(bins, width=num_bits, words=words)
        return Payload(payload, (low, high))

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        low, high = _range(frame)
        if low == high:
            if frame.flags & HUFFMAN or len(frame.payload) != frame.size // VALUES_PER_BYTE or any(frame.payload):
                raise FrameError("entropy: a constant tensor has a payload")
            if accumulate:
                out += out.dtype.type(low)
            else:
                out.fill(low)
            return
        num_bits, rest = frame.payload[0], memoryview(frame.payload)[1:]
        bins = space.array("entropy.bins", out.size, _dtype(num_bits))
        if frame.flags & HUFFMAN:
            _decode(rest, num_bits, bins, space)
        elif len(rest) == packed_nbytes(out.size, num_bits):
            unpack_integers(rest, width=num_bits, out=bins)
        else:
            raise FrameError(f"entropy: {len(rest)} bytes came for {out.size} values of {num_bits} bits")
        share = ((np.arange(1 << num_bits) if num_bits <= MOST_BITS else bins) + 0.5) / 2.0**num_bits
        middles = (low * (1.0 - share) + high * share).astype(out.dtype)
        put(middles[bins] if num_bits <= MOST_BITS else middles, out, accumulate)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        low, high = _range(frame)
        explained: Explained = {
            "low": (low, "the smallest value"),
            "high": (high, "the largest value; equal to the smallest for a constant tensor, which needs no bins"),
        }
        if low == high:
            return explained
        num_bits, huffman = frame.payload[0], bool(frame.flags & HUFFMAN)
        explained |= {
            "bits": (num_bits, "N, the payload's first byte: values lie in 2**N equal bins, decoded as their middles"),
            # Divided first: the difference of two float64 may overflow.
            "bin width": (
                high / 2.0**num_bits - low / 2.0**num_bits,
                "(high - low) / 2**N: the error is at most half of it",
            ),
            "Huffman": (huffman, "OPTION_A: bins are Huffman coded; without it, N bits each"),
        }
        if huffman:
            lengths, table_nbytes, edges = _read_code(memoryview(frame.payload)[1:], num_bits)
            explained |= {
                "Huffman table bytes": (table_nbytes, "code lengths of all 2**N symbols, runs shortened"),
                "symbols used": (int(np.count_nonzero(lengths)), f"of {1 << num_bits}"),
                "code lengths": (
                    [int(lengths[lengths > 0].min()), int(lengths.max())],
                    f"bits of the shortest and of the longest code, of at most {length_limit(num_bits)}",
                ),
                "stream bytes": (
                    [stop - start for start, stop in itertools.pairwise(edges)],
                    "four streams, each of a quarter of the values, which are decoded side by side",
                ),
            }
        return explained

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return 1 + packed_nbytes(frame.size, MOST_FIXED_BITS)

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        low, high = _range(frame)
        if low == high:
            return frame.size // VALUES_PER_BYTE
        num_bits = frame.payload[0] if len(frame.payload) else 0
        if not 1 <= num_bits <= (MAX_BITS if frame.flags & HUFFMAN else MOST_FIXED_BITS):
            raise FrameError(f"entropy: {num_bits} bits a value in {len(frame.payload)} payload bytes")
        return 1 + packed_nbytes(frame.size, 1 if frame.flags & HUFFMAN else num_bits)


def bin_values(values: FloatArray, *, low: float, high: float, num_bits: int) -> NDArray[Any]:
    """Returns the bins, 0 … 2**num_bits − 1, of values between `low` and `high`, which differ.

    Example:
        >>> bin_values(np.array([-1.0, 0.0, 1.0]), low=-1.0, high=1.0, num_bits=2).tolist()
        [0, 2, 3]
    """
    half = 1.0 if math.isfinite(float(high) - float(low)) else 0.5
    place = (values.astype(np.float64) * half - low * half) / (high * half - low * half) * 2.0**num_bits
    return np.minimum(place, 2.0**num_bits - 1).astype(_dtype(num_bits))


def entropy_of(bins: NDArray[Any]) -> float:
    """Returns the zero-order entropy of the bins, in bits.

    Example:
        >>> entropy_of(np.array([0, 0, 1, 1], np.int32))
        1.0
    """
    counts = np.unique(bins, return_counts=True)[1]
    shares = counts / bins.size
    return max(0.0, -math.fsum((shares * np.log2(shares)).tolist()))


def _dtype(num_bits: int) -> type[np.uint16] | type[np.int32]:
    """Returns the narrowest type of the bins."""
    return np.uint16 if num_bits <= MOST_BITS else np.int32


def _range(frame: Frame) -> tuple[float, float]:
    if len(frame.scales) != 2 or frame.scales[0] > frame.scales[1]:
        raise FrameError(f"entropy sends the smallest and the largest value; {list(frame.scales)[:4]} came")
    return frame.scales[0], frame.scales[1]


def _code(bins: NDArray[Any], num_bits: int, space: Scratch) -> bytes:
    """Returns code lengths, stream sizes and streams."""
    limit = length_limit(num_bits)
    lengths = code_lengths(np.bincount(bins, minlength=1 << num_bits), limit)
    room = space.array("entropy.room", room_nbytes(bins.size, limit), np.uint8)
    streams = encode_symbols(bins, lengths, room=room)
    sizes = b"".join(pack_varint(stream.size) for stream in streams[:-1])
    return b"".join((write_lengths(lengths), sizes, *(stream.data for stream in streams)))


def _decode(data: memoryview, num_bits: int, bins: NDArray[Any], space: Scratch) -> None:
    lengths, _, edges = _read_code(data, num_bits)
    streams = [data[start:stop] for start, stop in itertools.pairwise(edges)]
    room = space.array("entropy.room", len(data) + 16 * NUM_STREAMS, np.uint8)
    decode_symbols(streams, lengths, length_limit(num_bits), room=room, out=bins)


def _read_code(data: memoryview, num_bits: int) -> tuple[NDArray[np.uint8], int, list[int]]:
    """Returns the code lengths, their size in bytes, and the offsets of the streams."""
    lengths, at = read_lengths(data, 1 << num_bits, length_limit(num_bits))
    table_nbytes, sizes = at, []
    for stream in range(NUM_STREAMS - 1):
        size, at = parse_varint(data, at, f"the size of stream {stream}")
        sizes.append(size)
    if sum(sizes) > len(data) - at:
        raise FrameError(f"entropy: streams of {sizes} bytes and one more in {len(data) - at} bytes")
    return lengths, table_nbytes, [at, *(at + sum(sizes[: i + 1]) for i in range(NUM_STREAMS - 1)), len(data)]
