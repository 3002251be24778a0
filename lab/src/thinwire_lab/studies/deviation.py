"""The deviation among runs of several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation; NaN for fewer than two values and for infinite ones."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def spread(values: Sequence[float], digits: int) -> str:
    """Returns the text behind a mean: ± and the standard deviation; empty for fewer than two values."""
    return f" ± {deviation(values):.{digits}f}" if len(values) > 1 else ""
