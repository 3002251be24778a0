"""3LC of one flat array, all stages: floats and residual to payload, payload to floats.

Encoding reads the data twice, because the scale needs the maximum first: pass 1 only reads, so that a refusal changes
nothing; pass 2 writes residual and codes; zero runs follow on the codes, a twentieth of the data. Decoding checks the
whole payload before it writes the output. Callers handle shapes, other types than float32 and float64, frames and
contexts.
"""

from __future__ import annotations

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
from thinwire.kernels.numba.base243 import Workspace, pack_trits, unpack_trits
from thinwire.kernels.numba.jit import frozen, jit, largest_magnitude
from thinwire.kernels.numba.zero_run import decode_runs, encode_runs, num_expanded

# Products from here on round to infinity: half a unit above the largest float32.
OVERFLOW = {np.dtype(np.float32): 2.0**128 - 2.0**103, np.dtype(np.float64): np.inf}


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
        sparsity: the paper's s, 1 <= s < 2 in the arrays' type, which the caller has checked; or less, to send the
            largest values in part.
        zero_run: False skips zero runs (the paper's "No ZRE").
        residual: unsent values of earlier calls, same type and length, updated in place; None: no residual.
        residual_scale: the residual is multiplied by it before adding (ECQ-SGD: 0.1).
        workspace: scratch; holds the payload.

    Returns:
        m, and the payload: a view into the workspace, valid until its next use.

    Raises:
        NonFiniteError: NaN or Inf in v, or m overflows. The residual is unchanged, bit for bit.
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
    kind, given = values.dtype.type, frozen(values)
    factor, largest = kind(residual_scale), largest_magnitude(given, residual, kind(residual_scale))
    m = largest * float(kind(sparsity))  # the product of two float32 is exact in a double
    if not m < OVERFLOW[values.dtype]:  # or NaN
        raise NonFiniteError(non_finite(largest, sparsity))
    codes = workspace.payload  # not the buffer of decoding
    codes.reserve(num_codes_of(values.size))
    size = encode_codes(
        given,
        residual,
        factor,
        kind(m),
        zero_run,
        codes.bytes,
        codes.words,
        codes.words_at,
        workspace.words,
        workspace.digits,
    )
    return float(kind(m)), codes.bytes[:size]


def decode_ternary(
    payload: Any,
    *,
    scale: float,
    out: Floats,
    zero_run: bool = True,
    accumulate: bool = False,
    workspace: Workspace,
) -> None:
    """``out = scale * q``, or ``out += scale * q``, of a payload of `encode_ternary`.

    Args:
        payload: any buffer of bytes, untrusted.
        scale: m.
        out: float32[n] or float64[n], C-contiguous; n is the expected number of values.
        zero_run: as encoded.
        accumulate: add instead of store; where q is 0 no bit of `out` changes, -0.0 included.
        workspace: scratch.

    Raises:
        FrameError: the payload does not hold exactly ceil(n / 5) valid codes, or the scale is not a finite number >= 0.
            `out` is untouched.

    Example:
        >>> out = np.ones(6, dtype=np.float32)
        >>> decode_ternary(bytes([202, 40]), scale=0.5, out=out, accumulate=True, workspace=Workspace())
        >>> out.tolist()
        [1.5, 1.0, 1.0, 1.0, 1.0, 0.5]
    """
    check_scale(scale, out.dtype)
    received = frozen(np.frombuffer(payload, dtype=np.uint8))
    if zero_run:
        check_length(num_expanded(received), num_codes_of(out.size))
    else:
        check_codes(received, out.size)
    codes, m = workspace.codes, out.dtype.type(scale)
    codes.reserve(num_codes_of(out.size))
    decode_codes(received, zero_run, m, accumulate, codes.bytes, codes.words_at, workspace.floats(out.dtype), out)


@jit
def encode_codes(
    values: Any,
    residual: Any,
    residual_scale: Any,
    m: Any,
    zero_run: bool,
    codes: Any,
    words: Any,
    words_at: Any,
    scratch: Any,
    digits: Any,
) -> Any:
    """Fills the beginning of `codes` (the same memory as `words` and `words_at`); returns the payload's size."""
    num_codes = (values.size + 4) // 5
    pack_trits(values, residual, residual_scale, m, codes[:num_codes], digits)
    return encode_runs(words, num_codes, words_at, scratch) if zero_run else num_codes


@jit
def decode_codes(
    payload: Any, zero_run: bool, m: Any, accumulate: bool, codes: Any, words_at: Any, floats: Any, out: Any
) -> None:
    """Stores or adds a checked payload; `codes` (the same memory as `words_at`) is scratch."""
    if zero_run:
        decode_runs(payload, words_at)
        unpack_trits(codes[: (out.size + 4) // 5], m, accumulate, floats, out)
    else:
        unpack_trits(payload, m, accumulate, floats, out)
