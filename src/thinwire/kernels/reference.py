"""The 3LC arithmetic in plain NumPy: slow, short, and the judge of every other implementation.

Each function follows the paper's steps (3LC, sections 3.1-3.3) one after the other with whole-array operations.
The Numba kernels (and any later ones) must give the same bytes and the same residual bits; tests compare them.
Nothing here knows of frames, tensors or contexts: flat float32 or float64 arrays in, bytes out, and back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import NonFiniteError
from thinwire.kernels.contract import (
    LONGEST_RUN,
    ZERO_CODE,
    Bytes,
    Floats,
    check_codes,
    check_layout,
    check_length,
    check_residual,
    check_scale,
    non_finite,
)
from thinwire.kernels.numba.workspace import Workspace

WEIGHTS = np.array([81, 27, 9, 3, 1], dtype=np.uint8)


def max_magnitude(values: Floats) -> float:
    """The largest absolute value; infinite or NaN as soon as one value is. 0.0 for an empty array."""
    return float(np.max(np.abs(values))) if values.size else 0.0


def pack_base243(trits: NDArray[np.int8], *, layout: str = "stride", pad: int = 1, workspace: Workspace) -> Bytes:
    """Five trits to a byte, ``81*d0 + 27*d1 + 9*d2 + 3*d3 + d4`` with d = trit + 1 (3LC, section 3.2).

    Args:
        trits: int8[n] of -1, 0, 1.
        layout: "stride" groups five neighbours; "partition" takes one trit from each fifth of the array.
        pad: the digit that fills the last group(s); 1 is a quantised zero, the paper's text says 0.
        workspace: unused here.

    Returns:
        uint8[ceil(n / 5)], every byte at most 242.
    """
    check_layout(layout)
    num_codes = -(-trits.size // 5)
    digits = np.full(5 * num_codes, pad, dtype=np.uint8)
    digits[: trits.size] = trits + 1
    groups = digits.reshape(5, num_codes).T if layout == "partition" else digits.reshape(num_codes, 5)
    packed: Bytes = (groups * WEIGHTS).sum(axis=1, dtype=np.uint8)
    return packed


def unpack_base243(
    codes: Bytes, *, out: NDArray[np.int8], layout: str = "stride", workspace: Workspace
) -> NDArray[np.int8]:
    """The trits of `pack_base243`, written into `out` (int8[n]) and returned; padding is cut off.

    Raises:
        FrameError: the number of codes is not ceil(n / 5), or a code is above 242. `out` is untouched.
    """
    check_layout(layout)
    check_codes(codes, out.size)
    digits = codes[:, None] // WEIGHTS % 3
    flat = digits.T.reshape(-1) if layout == "partition" else digits.reshape(-1)
    out[:] = flat[: out.size].astype(np.int8) - 1
    return out


def zero_run_encode(codes: Bytes, *, workspace: Workspace) -> Bytes:
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


def zero_run_decode(payload: Any, num_codes: int, *, workspace: Workspace) -> Bytes:
    """The codes that `zero_run_encode` was given; any split of a run is understood.

    Raises:
        FrameError: the payload does not expand to exactly `num_codes` codes.
    """
    received = np.frombuffer(payload, dtype=np.uint8)
    counts = np.where(received >= 243, received.astype(np.int64) - 241, 1)
    check_length(int(counts.sum()), num_codes)
    return np.repeat(np.where(received >= 243, ZERO_CODE, received).astype(np.uint8), counts)


def encode_ternary(
    values: Floats,
    *,
    sparsity: float,
    layout: str = "stride",
    zero_run: bool = True,
    paper_literal: bool = False,
    residual: Floats | None = None,
    residual_scale: float = 1.0,
    workspace: Workspace,
) -> tuple[float, Bytes]:
    """3LC of one flat array: see `thinwire.kernels.encode_ternary` for the contract."""
    check_layout(layout)
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
    codes = pack_base243(q, layout=layout, pad=0 if paper_literal else 1, workspace=workspace)
    return float(m), zero_run_encode(codes, workspace=workspace) if zero_run else codes


def decode_ternary(
    payload: Any,
    *,
    scale: float,
    out: Floats,
    layout: str = "stride",
    zero_run: bool = True,
    accumulate: bool = False,
    workspace: Workspace,
) -> None:
    """The inverse of `encode_ternary`: see `thinwire.kernels.decode_ternary` for the contract."""
    check_scale(scale, out.dtype)
    codes = np.frombuffer(payload, dtype=np.uint8)
    if zero_run:
        codes = zero_run_decode(payload, -(-out.size // 5), workspace=workspace)
    q = unpack_base243(codes, out=np.empty(out.size, dtype=np.int8), layout=layout, workspace=workspace)
    m = out.dtype.type(scale)
    if accumulate:
        with np.errstate(over="ignore", invalid="ignore"):
            out[q != 0] += m * q[q != 0].astype(out.dtype)
    else:
        out[:] = np.where(q == 0, out.dtype.type(0), m * q.astype(out.dtype))


def zero_run_encode_parts(codes: Bytes, cuts: Sequence[int], *, workspace: Workspace) -> Bytes:
    """The paper's parallel encoding (3LC, section 3.3): parts encoded serially, then coalesced at their borders.

    The last byte of one part and the first of the next become one byte where both stand for zeros, together for at
    most fourteen; `kernels.numba.ternary_slices` with ``coalesce="paper"`` must give the same bytes.
    """

    def zeros(byte: int) -> int:
        return byte - 241 if byte >= 243 else int(byte == ZERO_CODE)

    encoded: list[int] = []
    for begin, end in itertools.pairwise(cuts):
        part = zero_run_encode(codes[begin:end], workspace=workspace).tolist()
        if encoded and part and zeros(encoded[-1]) and zeros(part[0]):
            both = zeros(encoded[-1]) + zeros(part[0])
            if both <= LONGEST_RUN:
                encoded[-1] = 243 + both - 2
                del part[0]
        encoded += part
    return np.array(encoded, dtype=np.uint8)
