"""Values rounded to a few levels: bins about their mean, each of which decodes to the mean of its members."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.jit import frozen, jit


def round_to_bins(values: Any, bits: int, codes: NDArray[np.uint8]) -> NDArray[Any]:
    """Fills `codes` with the bin of each value, of 2**bits; returns what each bin decodes to, the mean of its members.

    With 2 bits and more: c = v − mean, σ the standard deviation, and bins of 6σ/2**bits of which bin 2**(bits − 1) has
    its middle at the mean; the outer ones take what lies beyond. With 1 bit the two bins meet at the mean. Where there
    are no more values than bins, each has its own.

    Args:
        values: float32[n] or float64[n], finite.
        bits: 1 … 8.
        codes: uint8[n].

    Example:
        >>> codes = np.empty(5, np.uint8)
        >>> round_to_bins(np.array([1.0, -1.0, 1.5, -1.0, -2.0], np.float32), 2, codes).tolist(), codes.tolist()
        ([0.0, -2.0, -1.0, 1.25], [3, 2, 3, 2, 1])
    """
    num_bins, kind = 1 << bits, values.dtype.type
    if values.size <= num_bins:
        codes[:] = np.arange(values.size)
        exact = np.zeros(num_bins, kind)
        exact[: values.size] = values
        return exact
    book, unit = np.zeros((2, num_bins)), 1.0
    if kind is np.float64:  # whose squares may overflow
        unit = 2.0 ** min(max(math.frexp(float(np.abs(values).max()))[1], -1000), 1000)
    _round(frozen(values), 1.0 / unit, codes, book[0], book[1])
    most = float(np.finfo(kind).max)
    levels: NDArray[Any] = np.clip(book[0] * unit, -most, most).astype(kind)
    return levels


@jit
def _round(values: Any, lift: float, codes: Any, means: Any, members: Any) -> None:
    """`round_to_bins`, in units of which `lift` is the inverse; all sums from the first value to the last."""
    mean = 0.0
    for i in range(values.size):
        mean += values[i] * lift
    mean /= values.size
    squares = 0.0
    for i in range(values.size):
        squares += (values[i] * lift - mean) ** 2
    num_bins = means.size
    width = 6 * math.sqrt(squares / (values.size - 1)) / num_bins
    for i in range(values.size):
        v = values[i] * lift
        if num_bins == 2:
            code = 1 if v >= mean else 0
        elif width > 0:
            code = int(min(max(math.floor((v - mean) / width + (num_bins / 2 + 0.5)), 0.0), num_bins - 1.0))
        else:
            code = num_bins // 2
        codes[i] = code
        means[code] += v
        members[code] += 1
    for code in range(num_bins):
        if members[code] > 0:
            means[code] /= members[code]
