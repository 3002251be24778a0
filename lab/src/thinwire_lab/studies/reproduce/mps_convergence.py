"""Wu 2018, figures 5.7 and 5.8: accuracy by iteration and by time, and the time to equal accuracy.

A link changes the time of an iteration and not its result. Accuracies come from one training of each design by the
modelled clock, so that no machine runs ahead of others, and seconds of an iteration from separate short runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from thinwire.presentation.charts import Series
from thinwire.presentation.tables import Table
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.studies.reproduce import mps_nodes as on
from thinwire_lab.studies.reproduce.entry import Cell, Found, Scale, Shown, chart, scaled
from thinwire_lab.studies.reproduce.job_cells import TrainingFinding, train
from thinwire_lab.studies.reproduce.mps_nodes import MachineCell, NodesCell

_ITERATIONS: dict[Scale, int] = {"tiny": 12, "quick": 420, "full": 6000}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 1, "full": 3}
_POINTS = 14  # evaluations of a run
_COMPARED = (on.TENSORFLOW, on.SYNC_TOP, on.STALE, on.STALE_TOP)
_NETWORK = "resnet8"
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the iterations; a table shows the last evaluation before each."""
_THESIS = 0.43
SCALED = (
    "The thesis: ResNet-110 on CIFAR-10, 20,000 iterations of 64 images on each of four machines with a GPU. Here a "
    "ResNet of 8 layers on Fashion-MNIST, batches of 16 and far fewer iterations."
)


class ConvergenceCell(MachineCell, frozen=True, kw_only=True):
    """One training, evaluated every `eval_steps` iterations."""

    finding = TrainingFinding

    eval_steps: int

    def run(self, tell: Tell) -> TrainingFinding:
        return train(self, tell)


Curve = list[tuple[int, float]]


def _trainings(designs: Sequence[str], scale: Scale, machines: int | None = None) -> list[ConvergenceCell]:
    model, data = on.pair(scale, _NETWORK)
    steps = _ITERATIONS[scale]
    shared: dict[str, Any] = {
        "model": model,
        "data": data.replace("test=200]", "test=2000]"),
        "workers": machines or on.NODES[scale],
    }
    shared |= {"steps": steps, "eval_steps": max(1, steps // _POINTS)}
    return [ConvergenceCell(design=design, seed=seed, **shared) for seed in range(_SEEDS[scale]) for design in designs]


def _curves(found: Found) -> dict[tuple[str, int], Curve]:
    """Returns accuracies, means over seeds, by design and number of machines."""
    trained, curves = found.of(ConvergenceCell), dict[tuple[str, int], Curve]()
    for design, machines in dict.fromkeys((cell.design, cell.workers) for cell in trained):
        runs = trained.where(design=design, workers=machines)
        accuracies = runs.steps(lambda each: [accuracy for _, accuracy in each.evaluations])
        steps = [step for step, _ in runs.first[1].evaluations]
        curves[design, machines] = list(zip(steps, accuracies, strict=True))
    return curves


def _setting(found: Found) -> str:
    cells = found.of(ConvergenceCell)
    first, _ = cells.first
    return (
        f"{first.model} on {first.data}, {max(cells.each('workers'))} machines, batches of {first.batch}, "
        f"{first.steps:,} iterations on each, SGD of rate {first.lr:g}, {cells.seeds}."
    )


def _show_iterations(found: Found) -> Shown:
    series, lines = [], []
    curves = _curves(found)
    for (design, _), curve in curves.items():
        accuracies = [100 * accuracy for _, accuracy in curve]
        series.append(Series(label=on.LABELS[design], x=[step for step, _ in curve], y=accuracies))
        lines.append([on.LABELS[design], *(f"{100 * _at(curve, share)[1]:.2f}" for share in _SHARES)])
    evaluated = next(iter(curves.values()))
    header = ["", *(f"accuracy % after {_at(evaluated, share)[0]:,}" for share in _SHARES)]
    axes = "iterations of each machine", "test accuracy (%)"
    return Shown(
        setting=_setting(found),
        tables=[Table(header, lines, "Test accuracy by iterations")],
        charts=[chart("mps-figure-5.7", "Accuracy by iteration.", series, *axes)],
        notes=["The thesis draws curves without numbers: staleness and top 1 % both lose accuracy by iteration."],
    )


def _by_time_cells(scale: Scale) -> list[Cell]:
    trained = [*_trainings((on.TENSORFLOW, on.STALE_TOP), scale), *_trainings(("fp32",), scale, 1)]
    return [*trained, *on.nodes((on.TENSORFLOW, on.STALE_TOP), scale, on.RESNET, network=_NETWORK)]


def _show_times(found: Found) -> Shown:
    timed = found.of(NodesCell)
    single_s = timed.mean(lambda each: each.single_s)
    curves, accuracies = {}, _curves(found)
    for (design, machines), curve in accuracies.items():
        label = "single machine" if machines == 1 else on.LABELS[design]
        seconds = single_s if machines == 1 else timed.where(design=design).mean(lambda each: each.seconds_per_step)
        curves[label] = [(step * seconds, accuracy) for step, accuracy in curve]
    series = [
        Series(label=label, x=[time for time, _ in curve], y=[100 * accuracy for _, accuracy in curve])
        for label, curve in curves.items()
    ]
    base, ours = curves[on.LABELS[on.TENSORFLOW]], curves[on.LABELS[on.STALE_TOP]]
    lines = []
    [synchronous] = [curve for (design, _), curve in accuracies.items() if design == on.TENSORFLOW]
    for _, target in (_at(synchronous, share) for share in _SHARES):
        times = {label: _time_to(curve, target) for label, curve in curves.items()}
        theirs, mine = _time_to(base, target), _time_to(ours, target)
        part = "not reached" if mine is None or theirs is None else f"{mine / theirs:.0%}"
        texts = ["not reached" if each is None else f"{each:.2f} s" for each in times.values()]
        lines.append([f"{target:.1%}", *texts, f"{_THESIS:.0%}", part])
    header = [
        "accuracy",
        *curves,
        "of its time, thesis",
        f"ours: {on.LABELS[on.STALE_TOP]} of {on.LABELS[on.TENSORFLOW]}",
    ]
    return Shown(
        setting=_setting(found),
        tables=[Table(header, lines, "Modelled time to an accuracy; the thesis does not name that of its 43 %")],
        charts=[chart("mps-figure-5.8", "Accuracy by time.", series, "time (s), modelled", "test accuracy (%)")],
        notes=[
            f"Accuracies are those of {on.LABELS[on.TENSORFLOW]}, which stands for TensorFlow, at quarters "
            "of the iterations. A time is that of the first evaluation that reaches one.",
            on.MODELLED,
        ],
    )


def _at(curve: Curve, share: float) -> tuple[int, float]:
    """Returns the last evaluation up to a share of the iterations, or the first one of all."""
    most = share * curve[-1][0]
    return next((point for point in reversed(curve) if point[0] <= most), curve[0])


def _time_to(curve: Sequence[tuple[float, float]], accuracy: float) -> float | None:
    """Returns when a curve of times and accuracies first reaches an accuracy; None if it does not."""
    return next((time for time, reached in curve if reached >= accuracy), None)


ENTRIES = scaled(
    *("mps", SCALED),
    ("figure-5.7", "accuracy by iteration", 2, partial(_trainings, _COMPARED), _show_iterations),
    ("figure-5.8", "training time to accuracy", 2, _by_time_cells, _show_times),
)
