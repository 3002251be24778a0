"""The arithmetic of all codecs in plain NumPy: slow, short, and the judge of both backends, byte for byte.

Each function follows the papers' formulas one after the other with whole-array operations; no blocks, no tricks. A
function has the name of the kernel that it judges. Flat float32 or float64 arrays in, bytes out, and back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import NonFiniteError
from thinwire.kernels.contract import (
    LONGEST_RUN,
    UNIT,
    ZERO_CODE,
    Bytes,
    Floats,
    Key,
    check_codes,
    check_length,
    check_residual,
    check_scale,
    non_finite,
)
from thinwire.kernels.numba.moments import LANES, STRETCH, Moments

WEIGHTS = np.array([81, 27, 9, 3, 1], dtype=np.uint8)


def max_magnitude(values: Floats) -> float:
    """The largest absolute value; infinite or NaN as soon as one value is. 0.0 for an empty array."""
    return float(np.max(np.abs(values))) if values.size else 0.0


def pack_base243(trits: NDArray[np.int8]) -> Bytes:
    """Five trits to a byte, ``81*d0 + 27*d1 + 9*d2 + 3*d3 + d4`` with d = trit + 1 (3LC, section 3.2)."""
    digits = np.ones(5 * -(-trits.size // 5), dtype=np.uint8)  # a quantised zero fills the last group
    digits[: trits.size] = trits + 1
    packed: Bytes = (digits.reshape(-1, 5) * WEIGHTS).sum(axis=1, dtype=np.uint8)
    return packed


def unpack_base243(codes: Bytes, *, out: NDArray[np.int8]) -> NDArray[np.int8]:
    """The trits of `pack_base243`, written into `out` (int8[n]) and returned; padding is cut off."""
    check_codes(codes, out.size)
    digits = codes[:, None] // WEIGHTS % 3
    out[:] = digits.reshape(-1)[: out.size].astype(np.int8) - 1
    return out


def zero_run_encode(codes: Bytes) -> Bytes:
    """Zero-run encoding: k codes of 121 in a row, 2 <= k <= 14, become the byte 243 + (k - 2).

    Longer runs are cut greedily into fourteens, remainder last: the canonical, shortest form (3LC, section 3.3).
    """
    encoded: list[int] = []
    run = 0
    for code in [*codes.tolist(), -1]:
        if code == ZERO_CODE:
            run += 1
            continue
        while run >= 2:
            piece = min(run, LONGEST_RUN)
            encoded.append(243 + piece - 2)
            run -= piece
        encoded += [ZERO_CODE] * run + ([code] if code >= 0 else [])
        run = 0
    return np.array(encoded, dtype=np.uint8)


def zero_run_decode(payload: Any, num_codes: int) -> Bytes:
    """The codes that `zero_run_encode` was given; any split of a run is understood."""
    received = np.frombuffer(payload, dtype=np.uint8)
    counts = np.where(received >= 243, received.astype(np.int64) - 241, 1)
    check_length(int(counts.sum()), num_codes)
    return np.repeat(np.where(received >= 243, ZERO_CODE, received).astype(np.uint8), counts)


def encode_ternary(
    values: Floats,
    *,
    sparsity: float,
    zero_run: bool = True,
    residual: Floats | None = None,
    residual_scale: float = 1.0,
) -> tuple[float, Bytes]:
    """3LC of one flat array: see `kernels.numba.ternary`."""
    if residual is not None:
        check_residual(residual, values)
    dtype = values.dtype.type
    with np.errstate(over="ignore", invalid="ignore"):
        v = values if residual is None else dtype(residual_scale) * residual + values
        m = dtype(max_magnitude(v)) * dtype(sparsity)
    if not np.isfinite(m):
        raise NonFiniteError(non_finite(max_magnitude(v), sparsity))
    # The threshold form of round(v / m): equal to rounding half to even, with no division and no 0/0.
    q = (v > m / dtype(2)).astype(np.int8) - (v < -m / dtype(2)).astype(np.int8)
    if residual is not None:
        residual[:] = v - m * q.astype(values.dtype)
    codes = pack_base243(q)
    return float(m), zero_run_encode(codes) if zero_run else codes


def decode_ternary(
    payload: Any,
    *,
    scale: float,
    out: Floats,
    zero_run: bool = True,
    accumulate: bool = False,
) -> None:
    """The inverse of `encode_ternary`: see `kernels.numba.ternary`."""
    check_scale(scale, out.dtype)
    codes = np.frombuffer(payload, dtype=np.uint8)
    if zero_run:
        codes = zero_run_decode(payload, -(-out.size // 5))
    q = unpack_base243(codes, out=np.empty(out.size, dtype=np.int8))
    m = out.dtype.type(scale)
    if accumulate:
        with np.errstate(over="ignore", invalid="ignore"):
            out[q != 0] += m * q[q != 0].astype(out.dtype)
    else:
        out[:] = np.where(q == 0, out.dtype.type(0), m * q.astype(out.dtype))


def with_residual(values: Any, residual: Any, residual_scale: float) -> Any:
    """v = residual_scale·residual + values; values where there is no residual."""
    return values if residual is None else values.dtype.type(residual_scale) * residual + values


def draws(key: Key, size: int, first: int = 0) -> NDArray[np.uint32]:
    """The draws of values first, first + 1, …: `lowbias32` and `triple32` (Wellons), a word of the key before each."""
    x = (np.arange(first, first + size, dtype=np.int64) + key[0]).astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    x = x ^ (x >> np.uint32(16)) ^ np.uint32(key[1])
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    mixed: NDArray[np.uint32] = x ^ (x >> np.uint32(14))
    return mixed


def uniforms(key: Key, size: int) -> NDArray[np.float32]:
    """float32[size] in [0, 1), multiples of 2**-24."""
    return (draws(key, size) >> np.uint32(8)).astype(np.float32) * np.float32(UNIT)


def round_to_int8(
    values: Any, *, scale: float, levels: NDArray[np.int8], residual: Any = None, residual_scale: float = 1.0
) -> None:
    v = with_residual(values, residual, residual_scale)
    m = values.dtype.type(scale)
    levels[:] = np.clip(np.rint(v / m), -127, 127)
    if residual is not None:
        residual[:] = v - levels * m


def moments(values: Any, *, residual: Any = None, residual_scale: float = 1.0, unit: float = 1.0) -> Moments:
    """The unit is given. Value i of a stretch goes to running sum i mod 1,024; so do the stretches' sums."""
    v = with_residual(values, residual, residual_scale)
    lifted = v.astype(np.float64) * (1.0 / unit)

    def added(terms: Any) -> float:
        lanes = np.zeros(LANES)
        for start in range(0, terms.size, LANES):
            row = terms[start : start + LANES]
            lanes[: row.size] += row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        return float(lanes[0])

    def total(terms: Any) -> float:
        return added(np.array([added(terms[at : at + STRETCH]) for at in range(0, terms.size, STRETCH)]))

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
    v = with_residual(values, residual, residual_scale)
    bits[:] = np.packbits(v >= 0)
    if residual is not None:
        kind = values.dtype.type
        residual[:] = v - np.where(v >= 0, kind(high), kind(low))


def unpack_signs(bits: Bytes, *, low: float, high: float, out: Any, accumulate: bool) -> None:
    kind = out.dtype.type
    values = np.where(np.unpackbits(bits, count=out.size), kind(high), kind(low))
    out[:] = out + values if accumulate else values


def pack_stochastic(values: Any, *, scale: float, limit: float, key: Key, packing: str, codes: Bytes) -> int:
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
    if packing == "base243":
        return pack_base243(trits)
    digits = np.ones(-(-trits.size // 4) * 4, np.int64)
    digits[: trits.size] += trits
    codes: Bytes = (digits.reshape(-1, 4) << np.array([0, 2, 4, 6])).sum(axis=1).astype(np.uint8)
    return codes


def pack_integers(values: Any, *, offset: int = 0, width: int) -> Bytes:
    bits = (values.astype(np.int64)[:, None] + offset) >> np.arange(width) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")


def to_bfloat(values: Any) -> NDArray[np.uint16]:
    """Half of a unit is added, and a little less where that is a tie."""
    bits = values.astype(np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    halves: NDArray[np.uint16] = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
    return halves


def widen(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    wide: NDArray[np.float32] = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def select_top(values: Any, k: int) -> NDArray[np.int64]:
    chosen = np.sort(np.argsort(-np.abs(values), kind="stable")[:k])
    nonzero: NDArray[np.int64] = chosen[values[chosen] != 0]
    return nonzero


def bits_of_symbols(symbols: Any, lengths: Any) -> str:
    """Canonical Huffman codes one after the other, as text: shortest codes first, then by symbol."""
    codes, code, last = {}, 0, 0
    for length, symbol in sorted((int(length), s) for s, length in enumerate(lengths) if length):
        code <<= length - last
        codes[symbol] = f"{code:0{length}b}"
        code, last = code + 1, length
    return "".join(codes[symbol] for symbol in symbols.tolist())
