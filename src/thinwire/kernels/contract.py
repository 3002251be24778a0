"""Constants and checks of the codecs' arithmetic, shared by both backends, so that limits and messages are equal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError, FrameError, NonFiniteError

Bytes = NDArray[np.uint8]
Floats = NDArray[Any]  # float32 or float64, flat

ZERO_CODE = 121  # five quantised zeros: 81 + 27 + 9 + 3 + 1
FIRST_RUN = 243  # base-3^5 ends at 242; the bytes above mean runs of zero codes
LONGEST_RUN = 14  # zero codes in one byte: 255 = 243 + (14 - 2)
DIGITS_PER_CODE = {"base243": 5, "2bit": 4}
"""Trits in a byte, by packing."""

Key = tuple[int, int]
"""The key of random numbers: two 32-bit words."""
UNIT = 2.0**-24
"""Uniform numbers are multiples of it: the 24 high bits of a draw, exact in float32."""

_NON_FINITE = "the values (with their residual) hold NaN or Inf; nothing was changed: skip this step or mend the loss"


def num_codes_of(num_values: int) -> int:
    """Returns the number of codes (groups of five) that hold `num_values` values.

    Example:
        >>> [num_codes_of(n) for n in (0, 1, 5, 6)]
        [0, 1, 1, 2]
    """
    return -(-num_values // 5)


def check_residual(residual: Floats, values: Floats) -> None:
    """Raises ConfigError for a residual of another dtype or shape than the values; kernels would read past its end."""
    if residual.shape != values.shape or residual.dtype != values.dtype:
        raise ConfigError(
            f"the residual is {residual.dtype}{list(residual.shape)}, the values are "
            f"{values.dtype}{list(values.shape)}; make a new context for this tensor"
        )


def check_length(num_codes: int, expected: int) -> None:
    """Raises FrameError for a payload that holds another number of codes than the shape needs."""
    if num_codes != expected:
        raise FrameError(f"the payload holds {num_codes} codes of five values, the shape needs {expected}")


def check_codes(codes: Bytes, num_values: int) -> None:
    """Raises FrameError for base-3^5 codes that cannot be those of `num_values` trits."""
    check_length(codes.size, num_codes_of(num_values))
    if codes.size and int(codes.max()) >= FIRST_RUN:
        raise FrameError(f"byte {int(codes.max())} among base-3^5 codes, which end at 242: the payload is damaged")


def check_scale(scale: float, dtype: np.dtype[Any]) -> None:
    """Raises FrameError for a scale that no encoder sends: negative, NaN, or above the largest number of `dtype`."""
    largest = float(np.finfo(dtype).max)
    if not 0.0 <= scale <= largest:
        raise FrameError(f"scale {scale!r} is not between 0 and {largest:g}, the {dtype} range: the frame is damaged")


def non_finite(magnitude: float, sparsity: float) -> str:
    """Returns the error message for values without a finite scale."""
    if math.isfinite(magnitude):
        return (
            f"the scale overflows: largest magnitude {magnitude:g} times sparsity {sparsity:g}; "
            "nothing was changed: scale the values down"
        )
    return _NON_FINITE


def require_finite_magnitude(largest: float) -> None:
    """Raises NonFiniteError for values whose largest magnitude is NaN or Inf."""
    if not math.isfinite(largest):
        raise NonFiniteError(_NON_FINITE)
