"""DoubleSqueeze (Tang et al. 2019): its figures, and its theorem on many workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any

from thinwire.presentation.charts import Series, smooth
from thinwire.presentation.tables import Table
from thinwire_lab.studies.compare_rows import deviation, spread
from thinwire_lab.studies.reproduce.entry import Found, Made, Scale, Shown, chart, percent, scaled
from thinwire_lab.studies.reproduce.iteration_times import ONE_BIT, SGD, TOP_K, PlainCell, pair, timed
from thinwire_lab.studies.reproduce.iteration_times import SCALED as TIMED
from thinwire_lab.studies.reproduce.job_cells import TrainingFinding
from thinwire_lab.studies.reproduce.speedup import SPEEDUP
from thinwire_lab.workloads.data import data

SCALED = (
    "The paper: ResNet-18 on CIFAR-10, 8 workers of 256 examples, more than 160 epochs, one GPU each. On an easier "
    "task training loss tells methods apart where accuracy does not."
)

_LR = {"mlp": 0.2, "lenet5": 0.1}
_STEPS: dict[Scale, int] = {"tiny": 6, "quick": 600, "full": 2500}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 1, "full": 3}
_PRINTED = {
    "DoubleSqueeze": "like SGD",
    "MEM-SGD": "like SGD",
    "QSGD": "much slower than SGD",
    "Top-k SGD": "a little slower",
}


def trainings(methods: Sequence[str], scale: Scale) -> list[PlainCell]:
    """Returns the runs of some methods, seed by seed."""
    model, examples = pair(scale)
    shared: dict[str, Any] = {"model": model, "data": examples, "workers": 2 if scale == "tiny" else 8}
    shared |= {"steps": _STEPS[scale], "eval_steps": max(1, _STEPS[scale] // 12), "lr": _LR[model]}
    return [PlainCell(method=method, seed=seed, **shared) for seed in range(_SEEDS[scale]) for method in methods]


def final_loss(finding: TrainingFinding) -> float:
    losses = finding.history.losses
    return fmean(losses[-max(1, len(losses) // 10) :])


def setting(found: Found) -> str:
    first, finding = found.first
    return (
        f"{' and '.join(sorted(found.each('model')))} on {first.data}, {first.workers} workers of {finding.batch} "
        f"examples and a server, {first.steps:,} steps ({first.steps / _steps_per_epoch(found):.1f} epochs), plain SGD "
        f"at {finding.lr:g} and a tenth of it after two thirds, {found.seeds}, in one process."
    )


def _steps_per_epoch(found: Found) -> int:
    cell, finding = found.first
    return int(len(data(cell.data).train_x) // cell.workers // finding.batch)


def _loss_curve(found: Found, method: str) -> Series:
    runs = found.where(method=method)
    x, y = smooth(runs.steps(lambda each: each.history.losses), most=60)
    return Series(label=method, x=[each / _steps_per_epoch(runs) for each in x], y=y)


def _accuracy_curve(found: Found, method: str) -> Series:
    runs = found.where(method=method)
    epoch, (_, finding) = _steps_per_epoch(runs), runs.first
    scores = [[100 * each[1] for each in point] for point in zip(*(f.evaluations for f in runs.values()), strict=True)]
    error = [deviation(each) for each in scores] if len(runs) > 1 else None
    x = [step / epoch for step, _ in finding.evaluations]
    return Series(label=method, x=x, y=[fmean(each) for each in scores], error=error)


def _printed(method: str) -> str:
    return next((text for start, text in _PRINTED.items() if method.startswith(start)), "the baseline")


def _show_losses(item: str, methods: Sequence[str], found: Found) -> Shown:
    base, lines = found.where(method=SGD).mean(final_loss), []
    for method in methods:
        losses = found.where(method=method).figures(final_loss)
        loss = fmean(losses)
        lines.append([method, _printed(method), f"{loss:.4f}{spread(losses, 4)}", f"{loss / base:.2f}×"])
    about, axes = (f"doublesqueeze-{item}", "Training loss by epoch."), ("epoch", "training loss (nats)")
    return Shown(
        setting=setting(found),
        tables=[Table(["", "paper", "loss at the end", "of SGD's"], lines, "Training loss")],
        charts=[chart(*about, [_loss_curve(found, method) for method in methods], *axes, y_log=True)],
        notes=[
            "The paper prints no numbers; its words stand in the table. The loss at the end is the mean over the last "
            "tenth of the steps; other seeds of one method differ by less than a factor of 1.25."
        ],
    )


def _show_accuracies(item: str, methods: Sequence[str], found: Found) -> Shown:
    base, lines = found.where(method=SGD).mean(percent), []
    for method in methods:
        runs = found.where(method=method)
        scores, lag = runs.figures(percent), runs.mean(lambda each: each.lag)
        bits = (f"{runs.mean(attrgetter(name)):.2f}" for name in ("bits_push", "bits_pull"))
        accuracy = f"{fmean(scores):.2f}{spread(scores, 2)}", f"{fmean(scores) - base:+.2f}"
        lines.append([method, _printed(method), *accuracy, *bits, f"{lag:.1f}" if lag else "–"])
    header = ["", "paper", "accuracy (%)", "against SGD", "bits up", "bits down", "lag (steps)"]
    series = [_accuracy_curve(found, method) for method in methods]
    return Shown(
        setting=setting(found),
        tables=[Table(header, lines, "Test accuracy at the end")],
        charts=[chart(f"doublesqueeze-{item}", "Test accuracy by epoch.", series, "epoch", "test accuracy (%)")],
        notes=["Bits count the whole payload. The lag is the largest residual at the end, in updates of one step."],
    )


def _curves(number: int, methods: Sequence[str], show: Callable[[str, Sequence[str], Found], Shown], what: str) -> Made:
    item = f"figure-{number}"
    return item, what, 1, partial(trainings, methods), partial(show, item, methods)


_ENTRIES = (
    *scaled(
        *("doublesqueeze", SCALED),
        _curves(1, ONE_BIT, _show_losses, "training loss by epoch, 1 bit"),
        _curves(2, ONE_BIT, _show_accuracies, "test accuracy by epoch, 1 bit"),
        _curves(4, TOP_K, _show_losses, "training loss by epoch, top-k"),
        _curves(5, TOP_K, _show_accuracies, "test accuracy by epoch, top-k"),
    ),
    *scaled(
        *("doublesqueeze", TIMED),
        timed(3, ONE_BIT, "seconds per iteration by bandwidth, 1 bit"),
        timed(6, TOP_K, "seconds per iteration by bandwidth, top-k"),
        links=True,
    ),
    *SPEEDUP,
)
ENTRIES = sorted(_ENTRIES, key=lambda entry: entry.item)
