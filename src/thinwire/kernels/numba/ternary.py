"""3LC of one flat array, all stages: floats to payload with the residual kept, payload to floats.

Encoding reads the data twice, because the scale needs the maximum first: pass 1 only reads, so that everything can be
refused before anything is changed; pass 2 writes residual and codes; zero runs follow on the codes, a twentieth of the
data. Decoding checks the whole payload before it touches the output. Shapes, types other than float32 and float64,
frames and contexts are the callers' business.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from thinwire.errors import NonFiniteError
from thinwire.kernels.contract import (
    Bytes,
    Floats,
    check_codes,
    check_length,
    check_residual,
    check_scale,
    non_finite,
    num_codes_of,
)
from thinwire.kernels.numba.base243 import Workspace, add_sparse, pack_trits, unpack_trits
from thinwire.kernels.numba.jit import frozen, largest_magnitude
from thinwire.kernels.numba.zero_run import num_expanded, zero_run_decode, zero_run_encode

SPARSE_BELOW = 0.35  # payload bytes per code under which skipping zero runs beats walking through them

# From here on a product rounds to infinity: half a unit above the largest float32.
_OVERFLOW = {np.dtype(np.float32): 2.0**128 - 2.0**103, np.dtype(np.float64): np.inf}


def encode_ternary(
    values: Floats,
    *,
    sparsity: float,
    zero_run: bool = True,
    residual: Floats | None = None,
    residual_scale: float = 1.0,
    workspace: Workspace,
) -> tuple[float, Bytes]:
    """3-value quantisation with sparsity multiplication, base-3^5, zero runs (3LC, sections 3.1-3.3).

    With v = values, or residual_scale * residual + values, and m = max|v| * sparsity, all in the arrays' type:
    q = sign(v) where |v| > m / 2 (a tie is zero, as in rounding half to even), else 0; the residual becomes v - m*q.

    Args:
        values: float32[n] or float64[n], C-contiguous; never written.
        sparsity: the paper's s, 1 <= s < 2 in the arrays' type, as the caller has checked; or less, where the largest
            values are sent in part.
        zero_run: False leaves the codes as they are (the paper's "No ZRE").
        residual: what earlier calls did not send, same type and length, updated in place; None: nothing is kept.
        residual_scale: what the residual is multiplied by before adding (ECQ-SGD: 0.1).
        workspace: scratch, and the home of the payload.

    Returns:
        m, and the payload: a view into the workspace, valid until its next use.

    Raises:
        NonFiniteError: NaN or Inf in v, or m overflows. The residual is bit for bit what it was.
        ConfigError: a residual of another type or length.

    Example:
        >>> values = np.array([0.4, 0.1, -0.2, 0.0, 0.3, -0.4], dtype=np.float32)
        >>> residual = np.zeros(6, dtype=np.float32)
        >>> m, payload = encode_ternary(values, sparsity=1.75, residual=residual, workspace=Workspace())
        >>> round(m, 6), payload.tolist(), residual.round(6).tolist()[:2]
        (0.7, [202, 40], [-0.30000001192092896, 0.10000000149011612])
    """
    if residual is not None:
        check_residual(residual, values)
    given, r, size = frozen(values), _rounded(residual_scale, values.dtype), num_codes_of(values.size)
    workspace.payload.reserve(size)
    codes = workspace.payload.bytes[:size]
    m = _scale_of(largest_magnitude(given, residual, r), sparsity, values.dtype)
    pack_trits(given, None, residual, r, m, codes, workspace.digits)
    return float(m), zero_run_encode(codes, workspace=workspace) if zero_run else codes


def decode_ternary(
    payload: Any,
    *,
    scale: float,
    out: Floats,
    zero_run: bool = True,
    accumulate: bool = False,
    workspace: Workspace,
) -> None:
    """``out = scale * q``, or ``out += scale * q``, of a payload that `encode_ternary` made, or says so.

    Args:
        payload: any buffer of bytes, trusted in nothing.
        scale: m.
        out: float32[n] or float64[n], C-contiguous; n says how many values to expect.
        zero_run: as encoded.
        accumulate: add instead of store; where q is 0 no bit of `out` changes, -0.0 included.
        workspace: scratch.

    Raises:
        FrameError: the payload does not hold exactly ceil(n / 5) valid codes, or the scale is no finite number >= 0.
            `out` is untouched.

    Example:
        >>> out = np.ones(6, dtype=np.float32)
        >>> decode_ternary(bytes([202, 40]), scale=0.5, out=out, accumulate=True, workspace=Workspace())
        >>> out.tolist()
        [1.5, 1.0, 1.0, 1.0, 1.0, 0.5]
    """
    check_scale(scale, out.dtype)
    received = frozen(np.frombuffer(payload, dtype=np.uint8))
    num_codes = num_codes_of(out.size)
    if zero_run:
        check_length(num_expanded(received), num_codes)
        if accumulate and received.size < SPARSE_BELOW * num_codes:
            add_sparse(received, scale=scale, out=out, workspace=workspace)
            return
        received = zero_run_decode(received, num_codes, workspace=workspace)
    else:
        check_codes(received, out.size)
    unpack_trits(received, scale=scale, out=out, accumulate=accumulate, workspace=workspace)


def _scale_of(largest: float, sparsity: float, dtype: np.dtype[Any]) -> Any:
    """m = largest * sparsity, as the arrays' type would compute it: the product of two float32 is exact in a double."""
    product = largest * float(_rounded(sparsity, dtype))
    if product < _OVERFLOW[dtype]:  # and not NaN
        return dtype.type(product)
    raise NonFiniteError(non_finite(largest, sparsity))


@lru_cache
def _rounded(option: float, dtype: np.dtype[Any]) -> Any:
    """A codec's option in the type of the values. Kept: there are few, and rounding costs as much as a kernel call."""
    return dtype.type(option)
