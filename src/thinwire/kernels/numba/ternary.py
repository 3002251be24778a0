"""3LC of one flat array, all stages: floats to payload with the residual kept, payload to floats.

Encoding reads the data twice, because the scale needs the maximum first: pass 1 only reads, so that everything can be
refused before anything is changed; pass 2 writes residual and codes; zero runs follow on the codes, a twentieth of the
data. Decoding checks the whole payload before it touches the output. Shapes, types other than float32 and float64,
frames and contexts are the callers' business.

A large array may be cut into slices that several threads take, with the bytes and the residual of one thread. Every
stage is cut where its parts do not depend on each other: the maximum and the codes anywhere; zero runs where no run
crosses, or a multiple of fourteen codes into one, because there a serial encoder starts a new byte too, so the parts
only have to be put behind one another. A payload is cut anywhere: a first look at all parts says where in the output
each begins (3LC, section 3.3, "parallel decompression"). The paper cuts codes into equal parts and then coalesces bytes
at the borders, which depends on the number of parts: that is `coalesce="paper"`, and its decoder is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from thinwire.errors import ConfigError, NonFiniteError
from thinwire.executor import Executor, InTurn
from thinwire.kernels.contract import (
    FIRST_RUN,
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
    num_codes_of,
)
from thinwire.kernels.numba.base243 import Workspace, add_sparse, pack_trits, unpack_trits
from thinwire.kernels.numba.jit import frozen, largest_magnitude
from thinwire.kernels.numba.zero_run import num_expanded, zero_run_decode, zero_run_encode

COALESCE = ("canonical", "paper")
SPARSE_BELOW = 0.35  # payload bytes per code under which skipping zero runs beats walking through them
_LOOK_BACK = 4096
_IN_TURN = InTurn()

# From here on a product rounds to infinity: half a unit above the largest float32.
_OVERFLOW = {np.dtype(np.float32): 2.0**128 - 2.0**103, np.dtype(np.float64): np.inf}


def encode_ternary(
    values: Floats,
    *,
    sparsity: float,
    layout: str = "stride",
    zero_run: bool = True,
    paper_literal: bool = False,
    coalesce: str = "canonical",
    residual: Floats | None = None,
    residual_scale: float = 1.0,
    workspace: Workspace,
    others: Sequence[Workspace] = (),
    executor: Executor = _IN_TURN,
) -> tuple[float, Bytes]:
    """3-value quantisation with sparsity multiplication, base-3^5, zero runs (3LC, sections 3.1-3.3).

    With v = values, or residual_scale * residual + values, and m = max|v| * sparsity, all in the arrays' type:
    q = sign(v) where |v| > m / 2 (a tie is zero, as in rounding half to even), else 0; the residual becomes v - m*q.

    Args:
        values: float32[n] or float64[n], C-contiguous; never written.
        sparsity: the paper's s, 1 <= s < 2 in the arrays' type, as the caller has checked; or less, where the largest
            values are sent in part.
        layout: "stride" or "partition", see `base243`.
        zero_run: False leaves the codes as they are (the paper's "No ZRE").
        paper_literal: pad with digit 0, as the paper's text has it, instead of with quantised zeros.
        coalesce: "canonical" gives the same bytes whatever the number of slices; "paper" joins only the bytes at the
            borders of equal parts, so that its bytes depend on their number.
        residual: what earlier calls did not send, same type and length, updated in place; None: nothing is kept.
        residual_scale: what the residual is multiplied by before adding (ECQ-SGD: 0.1).
        workspace: scratch, and the home of the payload.
        others: scratch of further slices, one each.
        executor: runs the slices.

    Returns:
        m, and the payload: a view into the workspace, valid until its next use.

    Raises:
        NonFiniteError: NaN or Inf in v, or m overflows. The residual is bit for bit what it was.
        ConfigError: no such layout or coalescing, or a residual of another type or length.

    Example:
        >>> values = np.array([0.4, 0.1, -0.2, 0.0, 0.3, -0.4], dtype=np.float32)
        >>> residual = np.zeros(6, dtype=np.float32)
        >>> m, payload = encode_ternary(values, sparsity=1.75, residual=residual, workspace=Workspace())
        >>> round(m, 6), payload.tolist(), residual.round(6).tolist()[:2]
        (0.7, [202, 40], [-0.30000001192092896, 0.10000000149011612])
    """
    check_layout(layout)
    if coalesce not in COALESCE:
        raise ConfigError(f"coalesce {coalesce!r} does not exist; choose one of: {', '.join(COALESCE)}")
    if residual is not None:
        check_residual(residual, values)
    given, r, size = frozen(values), _rounded(residual_scale, values.dtype), num_codes_of(values.size)
    pad, partition = 0 if paper_literal else 1, layout == "partition"
    # A single slice shortens its codes where they are; several put what they shorten into the home of the payload.
    home = workspace.codes if zero_run and others else workspace.payload
    home.reserve(size)
    codes = home.bytes[:size]
    if not others:  # written out, because what slices need costs half as much as a small tensor
        m = _scale_of(largest_magnitude(given, residual, r), sparsity, values.dtype)
        pack_trits(given, None, residual, r, None, m, codes, 0, size, partition, pad, workspace.digits)
        return float(m), zero_run_encode(codes, workspace=workspace) if zero_run else codes
    crew = (workspace, *others)

    def look(begin: int, end: int, which: int) -> None:
        held = None if residual is None else residual[begin:end]
        found[which] = largest_magnitude(given[begin:end], held, r)

    def pack(begin: int, end: int, which: int) -> None:
        pack_trits(given, None, residual, r, None, m, codes, begin, end, partition, pad, crew[which].digits)

    found = [0.0] * len(crew)
    _each(executor, look, _equal_parts(values.size, len(crew)))
    m = _scale_of(float(np.max(found)), sparsity, values.dtype)  # NaN where one is
    parts = _equal_parts(size, len(crew))
    _each(executor, pack, parts)
    if not zero_run:
        return float(m), codes
    cuts = parts if coalesce == "paper" else canonical_cuts(codes, len(crew))
    return float(m), encode_runs(codes, cuts, coalesce=coalesce, workspaces=crew, executor=executor)


def decode_ternary(
    payload: Any,
    *,
    scale: float,
    out: Floats,
    layout: str = "stride",
    zero_run: bool = True,
    accumulate: bool = False,
    workspace: Workspace,
    others: Sequence[Workspace] = (),
    executor: Executor = _IN_TURN,
) -> None:
    """``out = scale * q``, or ``out += scale * q``, of a payload that `encode_ternary` made, or says so.

    Args:
        payload: any buffer of bytes, trusted in nothing.
        scale: m.
        out: float32[n] or float64[n], C-contiguous; n says how many values to expect.
        layout: as encoded.
        zero_run: as encoded.
        accumulate: add instead of store; where q is 0 no bit of `out` changes, -0.0 included.
        workspace: scratch.
        others: scratch of further slices of the payload, one each.
        executor: runs the slices.

    Raises:
        FrameError: the payload does not hold exactly ceil(n / 5) valid codes, or the scale is no finite number >= 0.
            `out` is untouched.
        ConfigError: no such layout.

    Example:
        >>> out = np.ones(6, dtype=np.float32)
        >>> decode_ternary(bytes([202, 40]), scale=0.5, out=out, accumulate=True, workspace=Workspace())
        >>> out.tolist()
        [1.5, 1.0, 1.0, 1.0, 1.0, 0.5]
    """
    check_layout(layout)
    check_scale(scale, out.dtype)
    received = frozen(np.frombuffer(payload, dtype=np.uint8))
    num_codes = num_codes_of(out.size)
    sparse = zero_run and accumulate and layout == "stride" and received.size < SPARSE_BELOW * num_codes

    def expand(codes: Bytes, first: int, last: int, target: Floats, workspace: Workspace) -> None:
        if sparse:
            add_sparse(codes, scale=scale, out=target, workspace=workspace)
            return
        if zero_run:
            codes = zero_run_decode(codes, last - first, workspace=workspace)
        unpack_trits(
            codes,
            scale=scale,
            out=target,
            layout=layout,
            accumulate=accumulate,
            workspace=workspace,
            first=first,
            num_codes=num_codes,
        )

    if not zero_run:
        check_codes(received, out.size)
    if not others:
        if zero_run:
            check_length(num_expanded(received), num_codes)
        expand(received, 0, num_codes, out, workspace)
        return
    crew = (workspace, *others)
    cuts = starts = _equal_parts(received.size, len(crew))
    if zero_run:
        counts = [0] * len(crew)

        def count(begin: int, end: int, which: int) -> None:
            counts[which] = num_expanded(received[begin:end])

        _each(executor, count, cuts)
        starts = [0, *itertools.accumulate(counts)]
        check_length(starts[-1], num_codes)

    def expand_part(begin: int, end: int, which: int) -> None:
        first, last = starts[which], starts[which + 1]
        target = out if layout == "partition" else out[5 * first : min(5 * last, out.size)]
        expand(received[begin:end], first, last, target, crew[which])

    _each(executor, expand_part, cuts)


def canonical_cuts(codes: Bytes, parts: int) -> list[int]:
    """Ends and cuts of nearly equal parts whose encodings, put behind one another, are the serial encoding.

    Example:
        >>> canonical_cuts(np.array([5] + [121] * 39 + [7], np.uint8), 2)
        [0, 29, 41]
    """
    cuts = _equal_parts(codes.size, parts)
    return [0, *(_moved(codes, cut) for cut in cuts[1:-1]), codes.size]


def encode_runs(
    codes: Bytes, cuts: Sequence[int], *, coalesce: str, workspaces: Sequence[Workspace], executor: Executor
) -> Bytes:
    """The zero-run encodings of the parts between `cuts`, joined, in the first workspace's payload buffer.

    Args:
        codes: uint8[L], in none of the workspaces' payload buffers.
        cuts: ascending, from 0 to L; for "canonical", those of `canonical_cuts`.
        coalesce: "canonical" joins parts as they are; "paper" makes one byte of two zero codes that meet, where it
            can hold both (3LC, section 3.3).
        workspaces: one for each part.
        executor: runs the parts.
    """
    home = workspaces[0].payload
    home.reserve(codes.size)  # before anything is inside, because growing loses it
    parts: list[Bytes] = [home.bytes[:0]] * (len(cuts) - 1)

    def encode(begin: int, end: int, which: int) -> None:
        parts[which] = zero_run_encode(codes[begin:end], workspace=workspaces[which])

    _each(executor, encode, cuts)
    end = parts[0].size
    for part in parts[1:]:
        rest = part
        if coalesce == "paper" and end and part.size:
            left, right = zeros_in(home.bytes[end - 1]), zeros_in(part[0])
            if left and right and left + right <= LONGEST_RUN:
                home.bytes[end - 1] = FIRST_RUN + left + right - 2
                rest = part[1:]
        home.bytes[end : end + rest.size] = rest
        end += rest.size
    return home.bytes[:end]


def zeros_in(byte: Any) -> int:
    """How many zero codes a byte of payload stands for; 0 for any other code.

    Example:
        >>> [zeros_in(byte) for byte in (120, 121, 243, 255)]
        [0, 1, 2, 14]
    """
    return int(byte) - FIRST_RUN + 2 if byte >= FIRST_RUN else int(byte == ZERO_CODE)


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


def _equal_parts(size: int, parts: int) -> list[int]:
    return [size * k // parts for k in range(parts + 1)]


def _moved(codes: Bytes, cut: int) -> int:
    """The first legal cut at or behind `cut`: see `canonical_cuts`."""
    start = _run_start(codes, cut)
    legal = start - (start - cut) // LONGEST_RUN * LONGEST_RUN
    run = np.flatnonzero(codes[cut:legal] != ZERO_CODE)
    return cut + int(run[0]) if run.size else min(legal, codes.size)


def _run_start(codes: Bytes, cut: int) -> int:
    """Where the zeros that end before `cut` begin; `cut` where there are none."""
    while cut:
        block = codes[max(0, cut - _LOOK_BACK) : cut]
        others = np.flatnonzero(block != ZERO_CODE)
        if others.size:
            return cut - block.size + int(others[-1]) + 1
        cut -= block.size
    return 0


def _each(executor: Executor, work: Callable[[int, int, int], None], cuts: Sequence[int]) -> None:
    """Runs ``work(begin, end, i)`` for part number i between cuts."""
    executor.run([partial(work, *ends, i) for i, ends in enumerate(itertools.pairwise(cuts))])
