"""Notes on runs of several machines or versions, deviations over seeds, and curves of runs."""

from __future__ import annotations

import math

import msgspec

from lab.tests.jobs.outcomes import run_outcome
from thinwire.presentation.charts import to_svg
from thinwire_lab.jobs.outcome import CurvePoint
from thinwire_lab.jobs.results import machine
from thinwire_lab.studies.compare_page import curves
from thinwire_lab.studies.deviation import deviation, spread
from thinwire_lab.studies.machines import mixed, mixed_versions


def test_another_processor_or_version_makes_a_note_and_other_threads_do_not() -> None:
    here = machine()
    assert mixed([here, msgspec.structs.replace(here, threads=here.threads + 1)]) == []
    [note] = mixed([here, msgspec.structs.replace(here, processor="a slower one")])
    assert "a slower one" in note
    [note] = mixed_versions([here, msgspec.structs.replace(here, thinwire="0.0.9")])
    assert f"thinwire {here.thinwire} and 0.0.9" in note


def test_one_seed_and_infinite_values_have_no_deviation() -> None:
    assert deviation([1.0, 2.0, 3.0]) == 1.0
    assert all(math.isnan(deviation([1.0, value])) for value in (math.nan, math.inf, -math.inf))
    assert math.isnan(deviation([7.0])) and math.isnan(deviation([]))
    assert [spread(values, 2) for values in ([7.0, 9.0], [7.0], [])] == [" ± 1.41", "", ""]


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
