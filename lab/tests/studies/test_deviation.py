"""Seeds of which one has diverged still make a table."""

from __future__ import annotations

import math

from thinwire_lab.studies.deviation import deviation, spread


def test_what_is_not_finite_makes_no_error() -> None:
    assert deviation([1.0, 2.0, 3.0]) == 1.0
    assert all(math.isnan(deviation([1.0, value])) for value in (math.nan, math.inf, -math.inf))


def test_one_seed_has_no_deviation() -> None:
    """0 would say that seeds agree."""
    assert math.isnan(deviation([7.0])) and math.isnan(deviation([]))
    assert [spread(values, 2) for values in ([7.0, 9.0], [7.0], [])] == [" ± 1.41", "", ""]
