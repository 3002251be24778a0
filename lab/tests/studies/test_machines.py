"""Deviations over seeds, and curves of runs."""

from __future__ import annotations

import math

from lab.tests.jobs.outcomes import run_outcome
from thinwire.presentation.charts import to_svg
from thinwire_lab.jobs.outcome import CurvePoint
from thinwire_lab.studies.compare_page import curves
from thinwire_lab.studies.compare_rows import deviation, spread


def test_one_seed_and_infinite_values_have_no_deviation() -> None:
    assert deviation([1.0, 2.0, 3.0]) == 1.0
    assert all(math.isnan(deviation([1.0, value])) for value in (math.nan, math.inf, -math.inf))
    assert math.isnan(deviation([7.0])) and math.isnan(deviation([]))
    assert [spread(values, 2) for values in ([7.0, 9.0], [7.0], [])] == [" ± 1.41", "", ""]


def test_curves_have_a_line_for_every_run() -> None:
    runs = [
        run_outcome(design=design, curve=[CurvePoint(step=s, seconds=s / 10, accuracy=s / 20) for s in range(count)])
        for design, count in (("fp32", 10), ("3lc[s=1.75]", 1), ("int8", 0))
    ]
    shown = curves(runs, "mlp on digits")
    [panel] = shown.panels
    assert panel.title == "mlp on digits" and [len(each.x) for each in panel.series] == [10, 1, 0]
    assert [label.partition(":")[0] for label in shown.labels()] == ["fp32", "3lc[s=1.75]", "int8"]
    assert "<svg" in to_svg(shown), "the legend has runs without points"
