"""Seeds of which one has diverged still make a table."""

from __future__ import annotations

import math

from thinwire.studies.deviation import deviation


def test_what_is_not_finite_makes_no_error() -> None:
    assert deviation([1.0, 2.0, 3.0]) == 1.0 and deviation([]) == deviation([7.0]) == 0.0
    assert all(math.isnan(deviation([1.0, value])) for value in (math.nan, math.inf, -math.inf))
