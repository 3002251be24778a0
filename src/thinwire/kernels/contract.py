"""What all implementations of the codecs' arithmetic agree on: the numbers of the codes, and what is refused.

Both backends import these, so that they cannot disagree about a limit or about a message.
"""

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
"""Of random numbers: two 32-bit words."""
UNIT = 2.0**-24
"""Uniform numbers are multiples of it: the 24 high bits of a draw, exact in float32."""

_NON_FINITE = "the values (with their residual) hold NaN or Inf; nothing was changed: skip this step or mend the loss"


def num_codes_of(num_values: int) -> int:
    """Codes (groups of five) that hold `num_values` values.

    Example:
        >>> [num_codes_of(n) for n in (0, 1, 5, 6)]
        [0, 1, 1, 2]
    """
    return -(-num_values // 5)


def check_residual(residual: Floats, values: Floats) -> None:
    """Refuse a residual that does not belong to the values (`ConfigError`): kernels would read past its end."""
    if residual.shape != values.shape or residual.dtype != values.dtype:
        raise ConfigError(
            f"the residual is {residual.dtype}{list(residual.shape)}, the values are "
            f"{values.dtype}{list(values.shape)}; make a new context for this tensor"
        )


def check_length(num_codes: int, expected: int) -> None:
    """Refuse a payload that holds another number of codes than the shape asks for (`FrameError`)."""
    if num_codes != expected:
        raise FrameError(f"the payload holds {num_codes} codes of five values, the shape asks for {expected}")


def check_codes(codes: Bytes, num_values: int) -> None:
    """Refuse base-3^5 codes that cannot stand for `num_values` trits (`FrameError`)."""
    check_length(codes.size, num_codes_of(num_values))
    if codes.size and int(codes.max()) >= FIRST_RUN:
        raise FrameError(f"byte {int(codes.max())} among base-3^5 codes, which end at 242: the payload is damaged")


def check_scale(scale: float, dtype: np.dtype[Any]) -> None:
    """Refuse a scale that no encoder sends: negative, NaN, or past the largest number of `dtype` (`FrameError`)."""
    largest = float(np.finfo(dtype).max)
    if not 0.0 <= scale <= largest:
        raise FrameError(f"scale {scale!r} is not between 0 and {largest:g}, the {dtype} range: the frame is damaged")


def non_finite(magnitude: float, sparsity: float) -> str:
    """What to tell a caller whose values have no finite scale."""
    if math.isfinite(magnitude):
        return (
            f"the scale overflows: largest magnitude {magnitude:g} times sparsity {sparsity:g}; "
            "nothing was changed: scale the values down"
        )
    return _NON_FINITE


def require_finite_magnitude(largest: float) -> None:
    """Refuse values whose largest magnitude is NaN or Inf (`NonFiniteError`)."""
    if not math.isfinite(largest):
        raise NonFiniteError(_NON_FINITE)
