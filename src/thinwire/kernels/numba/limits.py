"""What the machine itself can do: the loops that benchmarks set kernels against. Nothing here compresses.

Each touches memory as the job it bounds must, and does as little arithmetic as it can get away with.
"""

from __future__ import annotations

from typing import Any

from thinwire.kernels.numba.jit import jit


@jit
def two_pass_floor(values: Any, residual: Any) -> None:
    """The floor of encoding with a residual: ``r += g``, then ``r = f(r)``; 20 bytes a value for float32.

    Args:
        values: float32[n], read.
        residual: float32[n], read and written twice.
    """
    for i in range(values.size):
        residual[i] += values[i]
    shrink = residual.dtype.type(0.5)
    for i in range(values.size):
        residual[i] *= shrink


@jit
def read_modify_write(out: Any) -> None:
    """The floor of accumulating: every value is read and written once, in place; 8 bytes a value for float32."""
    one = out.dtype.type(1)
    for i in range(out.size):
        out[i] += one


@jit
def copy(source: Any, target: Any) -> None:
    """memcpy: what decoding into an array of the same size is set against; 8 bytes a value for float32."""
    for i in range(source.size):
        target[i] = source[i]


@jit
def fill(out: Any) -> None:
    """The floor of decoding: every value is written once; 4 bytes a value for float32."""
    one = out.dtype.type(1)
    for i in range(out.size):
        out[i] = one
