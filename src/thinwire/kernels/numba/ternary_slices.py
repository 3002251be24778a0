"""3LC of one large array in slices that several threads can take, with the bytes and the residual of one thread.

Every stage is cut where its parts do not depend on each other: the maximum and the quantisation anywhere; zero runs
where no run crosses, or a multiple of fourteen codes into one, because there a serial encoder starts a new byte too, so
the parts only have to be put behind one another. A payload is cut anywhere: a first look at all parts says where in the
output each begins (3LC, section 3.3, "parallel decompression").

The paper cuts codes into equal parts and then coalesces bytes at the borders, which depends on the number of parts:
that is `coalesce="paper"`, and its decoder is the same. Who runs the slices is the caller's business (`executor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from thinwire.errors import ConfigError
from thinwire.executor import Executor
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
    num_codes_of,
)
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.magnitude import largest_magnitude
from thinwire.kernels.numba.pack import quantise
from thinwire.kernels.numba.ternary import SPARSE_BELOW, scale_of
from thinwire.kernels.numba.unpack import add_sparse, dequantise
from thinwire.kernels.numba.workspace import Workspace
from thinwire.kernels.numba.zero_run import num_expanded, zero_run_decode, zero_run_encode

COALESCE = ("canonical", "paper")
_LOOK_BACK = 4096


def encode_slices(
    values: Floats,
    *,
    sparsity: float,
    layout: str = "stride",
    zero_run: bool = True,
    paper_literal: bool = False,
    coalesce: str = "canonical",
    residual: Floats | None = None,
    residual_scale: float = 1.0,
    workspaces: Sequence[Workspace],
    executor: Executor,
) -> tuple[float, Bytes]:
    """`encode_ternary` with as many slices as workspaces; the first workspace holds the payload.

    Args:
        values: as in `encode_ternary`, and all arguments that are not named here.
        coalesce: "canonical" gives the bytes of `encode_ternary` whatever the number of slices; "paper" joins only
            the bytes at the borders of equal parts, so that its bytes depend on their number.
        workspaces: one for each slice.
        executor: runs the slices.

    Raises:
        NonFiniteError: NaN or Inf in v, or m overflows. The residual is bit for bit what it was.
        ConfigError: no such layout or coalescing, or a residual of another type or length.

    Example:
        >>> from thinwire.executor import InTurn
        >>> m, payload = encode_slices(
        ...     np.zeros(200, np.float32), sparsity=1.0, workspaces=[Workspace(), Workspace()], executor=InTurn()
        ... )
        >>> payload.tolist()
        [255, 255, 253]
    """
    check_layout(layout)
    if coalesce not in COALESCE:
        raise ConfigError(f"coalesce {coalesce!r} does not exist; choose one of: {', '.join(COALESCE)}")
    if residual is not None:
        check_residual(residual, values)
    slices, main, given = len(workspaces), workspaces[0], frozen(values)
    r = values.dtype.type(residual_scale)
    m = scale_of(_largest(given, residual, r, slices, executor), sparsity, values.dtype)
    size = num_codes_of(values.size)
    home = main.codes if zero_run else main.payload
    home.reserve(size)
    codes = home.bytes[:size]

    def make(begin: int, end: int, workspace: Workspace) -> None:
        quantise(
            given,
            m,
            residual=residual,
            residual_scale=r,
            layout=layout,
            pad=0 if paper_literal else 1,
            workspace=workspace,
            codes=codes,
            span=(begin, end),
        )

    _each(executor, _equal_parts(size, slices), make, workspaces)
    if not zero_run:
        return float(m), codes
    cuts = _equal_parts(size, slices) if coalesce == "paper" else canonical_cuts(codes, slices)
    return float(m), encode_runs(codes, cuts, coalesce=coalesce, workspaces=workspaces, executor=executor)


def decode_slices(
    payload: Any,
    *,
    scale: float,
    out: Floats,
    layout: str = "stride",
    zero_run: bool = True,
    accumulate: bool = False,
    workspaces: Sequence[Workspace],
    executor: Executor,
) -> None:
    """`decode_ternary` with as many slices of the payload as workspaces, cut without a look at what they hold.

    Raises:
        FrameError: as `decode_ternary`; `out` is untouched.

    Example:
        >>> from thinwire.executor import InTurn
        >>> out = np.empty(10, np.float32)
        >>> decode_slices(bytes([202, 40]), scale=0.5, out=out, workspaces=[Workspace()] * 2, executor=InTurn())
        >>> out.tolist()
        [0.5, 0.0, 0.0, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0]
    """
    check_layout(layout)
    check_scale(scale, out.dtype)
    received = frozen(np.frombuffer(payload, dtype=np.uint8))
    slices, num_codes = len(workspaces), num_codes_of(out.size)
    cuts = _equal_parts(received.size, slices)
    starts = list(cuts)
    if zero_run:
        counts = [0] * slices

        def count(begin: int, end: int, which: int) -> None:
            counts[which] = num_expanded(received[begin:end])

        _each(executor, cuts, count, range(slices))
        starts = [0, *np.cumsum(counts).tolist()]
        check_length(starts[-1], num_codes)
    else:
        check_codes(received, out.size)
    sparse = zero_run and accumulate and layout == "stride" and received.size < SPARSE_BELOW * num_codes

    def expand(begin: int, end: int, which: int) -> None:
        first, last = starts[which], starts[which + 1]
        target = out if layout == "partition" else out[5 * first : min(5 * last, out.size)]
        workspace = workspaces[which]
        if sparse:
            add_sparse(received[begin:end], scale=scale, out=target, workspace=workspace)
            return
        codes = received[begin:end]
        if zero_run:
            codes = zero_run_decode(codes, last - first, workspace=workspace)
        dequantise(
            codes,
            scale=scale,
            out=target,
            layout=layout,
            accumulate=accumulate,
            workspace=workspace,
            first=first,
            num_codes=num_codes,
        )

    _each(executor, cuts, expand, range(slices))


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

    _each(executor, cuts, encode, range(len(parts)))
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


def _largest(given: Any, residual: Floats | None, residual_scale: Any, slices: int, executor: Executor) -> float:
    found = np.zeros(slices)

    def look(begin: int, end: int, which: int) -> None:
        held = None if residual is None else residual[begin:end]
        found[which] = largest_magnitude(given[begin:end], held, residual_scale)

    _each(executor, _equal_parts(given.size, slices), look, range(slices))
    return float(found.max())  # NaN where one is


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


def _each(executor: Executor, cuts: Sequence[int], work: Any, owned: Sequence[Any]) -> None:
    """Runs ``work(begin, end, owned[i])`` for every part between cuts."""
    ends = zip(cuts, cuts[1:], owned, strict=False)
    executor.run([partial(work, begin, end, own) for begin, end, own in ends])
