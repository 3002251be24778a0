"""The arithmetic of the other codecs in plain NumPy: the judge of the compiled kernels, equal to them byte for byte.

`reference` is the same for 3LC. Whole-array operations in the order of the papers' formulas; no blocks, no tricks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.moments import LANES, Moments
from thinwire.kernels.numba.uniform import Key, draws, uniforms


def with_residual(values: Any, residual: Any, residual_scale: float) -> Any:
    """v = residual_scale·residual + values; values where there is no residual."""
    return values if residual is None else values.dtype.type(residual_scale) * residual + values


def round_to_int8(
    values: Any, *, scale: float, levels: NDArray[np.int8], residual: Any = None, residual_scale: float = 1.0
) -> None:
    """See `thinwire.kernels.numba.rounding.round_to_int8`."""
    v = with_residual(values, residual, residual_scale)
    m = values.dtype.type(scale)
    levels[:] = np.clip(np.rint(v / m), -127, 127)
    if residual is not None:
        residual[:] = v - levels * m


def moments(values: Any, *, residual: Any = None, residual_scale: float = 1.0, unit: float = 1.0) -> Moments:
    """See `thinwire.kernels.numba.moments.moments`; the unit is given. Value i goes to running sum i mod 1,024."""
    v = with_residual(values, residual, residual_scale)
    lifted = v.astype(np.float64) * (1.0 / unit)

    def total(terms: Any) -> float:
        lanes = np.zeros(LANES)
        for start in range(0, terms.size, LANES):
            row = terms[start : start + LANES]
            lanes[: row.size] += row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        return float(lanes[0])

    positive, negative = total(np.where(lifted > 0, lifted, 0.0)), total(np.where(lifted < 0, lifted, 0.0))
    largest = float(np.abs(v).max(initial=0.0))
    return Moments(positive, negative, total(lifted * lifted), int((v >= 0).sum()), largest, unit)


def pack_signs(
    values: Any,
    *,
    bits: Bytes,
    residual: Any = None,
    residual_scale: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
) -> None:
    """See `thinwire.kernels.numba.signs.pack_signs`."""
    v = with_residual(values, residual, residual_scale)
    bits[:] = np.packbits(v >= 0)
    if residual is not None:
        kind = values.dtype.type
        residual[:] = v - np.where(v >= 0, kind(high), kind(low))


def unpack_signs(bits: Bytes, *, low: float, high: float, out: Any, accumulate: bool) -> None:
    """See `thinwire.kernels.numba.signs.unpack_signs`."""
    kind = out.dtype.type
    values = np.where(np.unpackbits(bits, count=out.size), kind(high), kind(low))
    out[:] = out + values if accumulate else values


def pack_stochastic(values: Any, *, scale: float, limit: float, key: Key, packing: str, codes: Bytes) -> int:
    """See `thinwire.kernels.numba.stochastic.pack_stochastic`."""
    trits = ternarise(values, scale=scale, limit=limit, uniforms=uniforms(key, values.size))
    codes[:] = pack_trits(trits, packing)
    return int(np.count_nonzero(trits))


def ternarise(values: Any, *, scale: float, limit: float, uniforms: Any) -> NDArray[np.int8]:
    """TernGrad's t for given uniform numbers: sign(v) where u·scale < min(|v|, limit), else 0."""
    kind = values.dtype.type
    kept = uniforms.astype(kind) * kind(scale) < np.minimum(np.abs(values), kind(limit))
    trits: NDArray[np.int8] = (np.sign(values) * kept).astype(np.int8)
    return trits


def pack_trits(trits: NDArray[np.int8], packing: str) -> Bytes:
    """Trits as base-3^5 codes, or as two bits each, four to a byte, the first in the low bits; padded with zeros."""
    places = np.array([81, 27, 9, 3, 1] if packing == "base243" else [1, 4, 16, 64])
    digits = np.ones(-(-trits.size // places.size) * places.size, np.int64)
    digits[: trits.size] += trits
    codes: Bytes = (digits.reshape(-1, places.size) * places).sum(axis=1).astype(np.uint8)
    return codes


def pack_integers(values: Any, *, offset: int = 0, width: int) -> Bytes:
    """See `thinwire.kernels.numba.integers.pack_integers`."""
    bits = (values.astype(np.int64)[:, None] + offset) >> np.arange(width) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")


def round_to_integers(values: Any, *, scale: float, top: int) -> NDArray[np.int32]:
    """See `thinwire.kernels.numba.integers.round_to_integers`."""
    numbers: NDArray[np.int32] = np.clip(np.rint(values.astype(np.float64) / scale * top), -top, top).astype(np.int32)
    return numbers


def scale_integers(numbers: Any, *, scale: float, top: int, dtype: Any) -> Any:
    """See `thinwire.kernels.numba.integers.scale_integers`."""
    return (scale * (numbers.astype(np.float64) / top)).astype(dtype)


def to_half(values: Any) -> NDArray[np.uint16]:
    """See `thinwire.kernels.numba.casts.to_half`."""
    halves: NDArray[np.uint16] = values.astype(np.float16).view(np.uint16)
    return halves


def to_bfloat(values: Any) -> NDArray[np.uint16]:
    """See `thinwire.kernels.numba.casts.to_bfloat`: half of a unit is added, and a little less where that is a tie."""
    bits = values.astype(np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    halves: NDArray[np.uint16] = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
    return halves


def widen(halves: NDArray[np.uint16], kind: str) -> NDArray[np.float32]:
    """See `thinwire.kernels.numba.casts.widen`."""
    if kind == "half":
        return halves.view(np.float16).astype(np.float32)
    wide: NDArray[np.float32] = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def kept_positions(size: int, *, key: Key, kept: int) -> NDArray[np.int64]:
    """See `thinwire.kernels.numba.thinning.kept_positions`."""
    return np.flatnonzero(draws(key, size) >> np.uint32(8) < kept)


def bucket_norms(values: Any, *, bucket: int, unit: float = 1.0) -> NDArray[np.float64]:
    """See `thinwire.kernels.numba.levels.bucket_norms`; the unit is given. Squares are added up in order."""
    squares = (values.astype(np.float64) / unit) ** 2
    sums = [squares[start : start + bucket].cumsum()[-1] for start in range(0, values.size, bucket)]
    norms: NDArray[np.float64] = np.sqrt(np.array(sums)) * unit
    return norms


def value_of_levels(levels: Any, *, norms: Any, bucket: int, worth: Any, dtype: Any) -> Any:
    """See `thinwire.kernels.numba.levels.value_of_levels`."""
    norm = np.repeat(norms.astype(np.float64), bucket)[: levels.size]
    return (norm * worth[levels + worth.size // 2]).astype(dtype)


def select_top(values: Any, k: int) -> NDArray[np.int64]:
    """See `thinwire.kernels.numba.select.select_top`."""
    magnitudes = np.abs(values)
    threshold = np.partition(magnitudes, values.size - k)[values.size - k]
    above = np.flatnonzero(magnitudes > threshold)
    ties = np.flatnonzero(magnitudes == threshold)[: k - above.size]
    chosen = np.sort(np.concatenate((above, ties)))
    nonzero: NDArray[np.int64] = chosen[values[chosen] != 0]
    return nonzero


def round_to_levels(values: Any, *, norms: Any, bucket: int, top: int, natural: bool, key: Key) -> NDArray[np.int16]:
    """See `thinwire.kernels.numba.levels.round_to_levels`: the level below, and one more with the right probability."""
    norm = np.repeat(norms.astype(np.float64), bucket)[: values.size]
    a = np.divide(np.abs(values.astype(np.float64)), norm, out=np.zeros(values.size), where=norm > 0)
    grid = np.ldexp(1.0, np.arange(1, top + 1) - top) if natural else np.arange(1, top + 1) / top
    if natural:
        below = np.searchsorted(grid, a, side="right")
        floor = np.concatenate(([0.0], grid))[below]
        step = np.where(below == 0, grid[0], floor)
        share = (a - floor) / step
    else:
        below = np.floor(a * top)
        share = a * top - below
    level = np.minimum(below + (uniforms(key, values.size).astype(np.float64) < share), top)
    signed: NDArray[np.int16] = np.where(values > 0, level, -level).astype(np.int16)
    return signed


def bits_of_elias_gamma(levels: Any) -> str:
    """Elias-gamma of |level| + 1 and, unless the level is 0, a sign bit: as text, in stream order."""
    words = []
    for level in levels.tolist():
        number = abs(level) + 1
        low = [str(number >> i & 1) for i in range(number.bit_length() - 1)]
        words.append("0" * len(low) + "1" + "".join(low) + ("" if level == 0 else "01"[level < 0]))
    return "".join(words)


def bin_values(values: Any, *, low: float, high: float, num_bits: int) -> NDArray[np.int32]:
    """See `thinwire.kernels.numba.bins.bin_values`; for ranges that do not overflow."""
    place = (values.astype(np.float64) - low) / (high - low) * 2.0**num_bits
    bins: NDArray[np.int32] = np.minimum(np.floor(place), 2.0**num_bits - 1).astype(np.int32)
    return bins


def bits_of_symbols(symbols: Any, lengths: Any) -> str:
    """Canonical Huffman codes one after the other, as text: shortest codes first, then by symbol."""
    codes, code, last = {}, 0, 0
    for length, symbol in sorted((int(length), s) for s, length in enumerate(lengths) if length):
        code <<= length - last
        codes[symbol] = f"{code:0{length}b}"
        code, last = code + 1, length
    return "".join(codes[symbol] for symbol in symbols.tolist())
