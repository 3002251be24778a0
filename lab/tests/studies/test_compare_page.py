"""Accuracy against time, as a chart; and what draws is loaded where something is drawn."""

from __future__ import annotations

from lab.tests.jobs.outcomes import run_outcome
from thinwire.presentation.charts import to_svg
from thinwire_lab.jobs.outcome import CurvePoint
from thinwire_lab.studies.compare_page import curves


def test_every_run_has_a_line() -> None:
    runs = [
        run_outcome(design=design, curve=[CurvePoint(step=s, seconds=s / 10, accuracy=s / 20) for s in range(count)])
        for design, count in (("fp32", 10), ("3lc[s=1.75]", 1), ("int8", 0))
    ]
    shown = curves(runs, "mlp on digits")
    [panel] = shown.panels
    assert panel.title == "mlp on digits" and [len(each.x) for each in panel.series] == [10, 1, 0]
    assert [label.partition(":")[0] for label in shown.labels()] == ["fp32", "3lc[s=1.75]", "int8"]
    assert "<svg" in to_svg(shown), "who has nothing to show is in the legend"
