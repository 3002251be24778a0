"""How far the runs of several seeds lie apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation; NaN of fewer than two values, which have none, and where one is not finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def spread(values: Sequence[float], digits: int) -> str:
    """Returns what stands behind a mean: its ± with so many digits, nothing of fewer than two values."""
    return f" ± {deviation(values):.{digits}f}" if len(values) > 1 else ""
