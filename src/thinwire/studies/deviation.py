"""How far the runs of several seeds lie apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation; 0 of a single value, NaN where one of several is not finite.

    Example:
        >>> deviation([1.0, 3.0]), deviation([2.0]), deviation([math.inf, 1.0])
        (1.4142135623730951, 0.0, nan)
    """
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
