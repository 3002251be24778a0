"""The arithmetic of the lab's codecs in plain NumPy, like `tests.kernels.oracle`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.oracle import uniforms
from thinwire.kernels.contract import Key


def bucket_norms(values: Any, *, bucket: int, unit: float = 1.0) -> NDArray[np.float64]:
    """The unit is given. Squares are added up in order."""
    squares = (values.astype(np.float64) / unit) ** 2
    sums = [squares[start : start + bucket].cumsum()[-1] for start in range(0, values.size, bucket)]
    norms: NDArray[np.float64] = np.sqrt(np.array(sums)) * unit
    return norms


def value_of_levels(levels: Any, *, norms: Any, bucket: int, worth: Any, dtype: Any) -> Any:
    norm = np.repeat(norms.astype(np.float64), bucket)[: levels.size]
    return (norm * worth[levels + worth.size // 2]).astype(dtype)


def round_to_levels(values: Any, *, norms: Any, bucket: int, top: int, natural: bool, key: Key) -> NDArray[np.int16]:
    """The level below, and one more with the right probability."""
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
