"""Charts of hooks: what is beside what, a target or a frontier with the curves, and medians over seeds."""

from __future__ import annotations

from dataclasses import replace

from thinwire_lab.bench import charts
from thinwire_lab.bench.hook_cells import HookCell
from thinwire_lab.jobs.outcome import CurvePoint


def test_bars_of_step_times_are_medians_over_the_seeds_by_model_link_and_hook() -> None:
    cell = HookCell(hook="none", model="lenet", link="10mbit")
    other = replace(cell, hook="bf16")
    steps = {replace(cell, seed=seed): seconds for seed, seconds in enumerate((0.1, 0.3, 0.2))}
    steps |= {replace(cell, link=None): 0.01, other: 0.05, replace(other, model="mlp-5m"): 0.4}
    lenet, mlp = charts.step_times(steps).panels
    assert (lenet.title, mlp.title) == ("lenet, 4 ranks", "mlp-5m, 4 ranks")
    assert [(each.label, each.x, each.y) for each in lenet.series] == [
        ("none", ["10mbit", "unlimited"], [200.0, 10.0]),
        ("bf16", ["10mbit"], [50.0]),
    ]
    assert [(each.label, each.y) for each in mlp.series] == [("bf16", [400.0])]


def test_a_race_has_a_curve_for_each_seed_and_the_target() -> None:
    cell = HookCell(hook="none", model="lenet", link="10mbit", target=0.995, eval_every=25)
    curve = [CurvePoint(step=0, seconds=0.0, accuracy=0.1), CurvePoint(step=25, seconds=2.5, accuracy=0.85)]
    curves = {cell: curve, replace(cell, seed=1): curve[:1], replace(cell, link=None): curve[:1]}
    thin, unlimited = charts.race(curves).panels
    assert (thin.title, unlimited.title) == ("lenet, 10mbit", "lenet, unlimited")
    assert [each.label for each in thin.series] == ["none", "none", "the target, 99.5%"]
    assert (thin.series[0].x, thin.series[0].y) == ([0.0, 2.5], [10.0, 85.0])
    target = thin.series[-1]
    assert (target.x, target.y, target.role) == ([2.5, 2.5], [99.5, 99.5], "reference")
    assert [each.label for each in unlimited.series] == ["none"], "nobody was anywhere beside the start"


def test_a_loss_race_has_a_panel_for_each_measure_and_the_frontier_last() -> None:
    curve = {"none": [(1.0, 3.0), (4.0, 2.0)], "update": [(2.0, 2.5), (3.0, 2.75)]}
    shown = charts.loss_race({("model", f"seconds at link {link}"): curve for link in range(5)})
    assert [panel.x_label for panel in shown.panels] == [f"seconds at link {link}" for link in range(5)]
    none, update, frontier = shown.panels[0].series
    assert (none.label, none.x, none.y) == ("none", [1.0, 4.0], [3.0, 2.0]) and update.label == "update"
    assert frontier.role == "reference"
    assert (frontier.x, frontier.y) == ([1.0, 2.0, 2.0, 4.0, 4.0], [3.0, 3.0, 2.5, 2.5, 2.0])
