"""TernGrad's trainings of a LeNet: accuracy by number of workers (§4.1), and curves by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from thinwire.codecs import codec, decode
from thinwire.presentation.charts import Chart, Panel, Series, smooth
from thinwire.presentation.tables import Table
from thinwire_lab.jobs.job import Job
from thinwire_lab.studies.reproduce.entry import OnProgress, Scale, Shown, scaled
from thinwire_lab.studies.reproduce.job_cells import TrainingCell, TrainingFinding, train
from thinwire_lab.studies.reproduce.stand_ins import Pair, stand_in

FLOATING, TERNARY = "fp32", "terngrad[last_layer=same]"
"""In §4.1 the last layer is ternary like the others; that it stays in float is one of §4.2's changes for large nets."""
LARGE = "terngrad"
NAMES = {FLOATING: "floating", TERNARY: "TernGrad", LARGE: "TernGrad"}
SCALED = (
    "The paper: LeNet on MNIST and AlexNet on ImageNet, accuracies of averaged parameters. Fashion-MNIST leaves more "
    "errors than MNIST, so that differences are larger; the trained parameters themselves are evaluated."
)
_TOTAL_BATCH = 64
_WORKERS: dict[Scale, tuple[int, ...]] = {"tiny": (2,), "quick": (2, 16, 64), "full": (2, 4, 8, 16, 32, 64)}
_STEPS: dict[Scale, int] = {"tiny": 4, "quick": 150, "full": 10_000}
_RATES = {"momentum SGD": (0.9, 0.01), "vanilla SGD": (0.0, 0.1)}
"""Momentum and base rate (§4.1)."""
_CURVE_WORKERS, _CURVE_BATCH = 4, 128
_CURVE_STEPS: dict[Scale, int] = {"tiny": 4, "quick": 60, "full": 2_400}


class RecipeCell(TrainingCell, frozen=True, kw_only=True):
    """A training by the paper's own recipe."""

    optimizer: str = "SGD"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "polynomial"
    final: float = 0.0

    def job(self, **more: Any) -> Job:
        """Returns the run; momentum is of SGD alone."""
        return super().job(**({} if self.optimizer == "SGD" else {"momentum": None}) | more)

    def __str__(self) -> str:
        how = self.optimizer if self.optimizer != "SGD" else f"momentum {self.momentum:g}"
        return f"{super().__str__()}, {how}"


class CurvesFinding(TrainingFinding, frozen=True, kw_only=True):
    """What a training came to, and by step the share of zeros in worker 0's ternary gradient of the first matrix."""

    zeros: list[float]


class CurvesCell(RecipeCell, frozen=True, kw_only=True, tag="RecipeCell"):
    """A training whose zeros are counted; other entries use its run as a plain one."""

    finding = CurvesFinding

    def run(self, on_progress: OnProgress) -> CurvesFinding:
        coder, zeros = codec("terngrad"), []

        def on_step(rank: int, step: int, loss: float, model: nn.Module) -> None:
            gradient = next(each.grad for each in model.parameters() if each.ndim == 2)
            if rank == 0 and gradient is not None:
                values = torch.as_tensor(decode(coder.encode(gradient, key=coder.key(self.seed, "zeros", step))))
                zeros.append(float((values == 0).float().mean()))

        return train(self, on_progress, on_step=on_step).grown(CurvesFinding, zeros=zeros)


Found = Mapping[RecipeCell, TrainingFinding]


def pair(scale: Scale) -> Pair:
    """Returns the model and the data of a scale."""
    return stand_in(scale, ("lenet", "fashion-mnist"))


def _workers_cells(scale: Scale) -> Sequence[RecipeCell]:
    model, data = pair(scale)
    return [
        RecipeCell(
            design=design,
            model=model,
            data=data,
            workers=workers,
            batch=_TOTAL_BATCH // workers,
            steps=_STEPS[scale],
            eval_steps=0,
            lr=rate,
            momentum=momentum,
        )
        for workers in _WORKERS[scale]  # many take long: what an interrupted study has made so far holds both rates
        for momentum, rate in _RATES.values()
        for design in (FLOATING, TERNARY)
    ]


def _curve_cells(scale: Scale) -> Sequence[CurvesCell]:
    model, data = pair(scale)
    steps = _CURVE_STEPS[scale]
    return [
        CurvesCell(
            design=design,
            model=model,
            data=data,
            workers=_CURVE_WORKERS,
            batch=16 if scale == "tiny" else _CURVE_BATCH,
            steps=steps,
            eval_steps=max(2, steps // 12),
            lr=0.02,
        )
        for design in (FLOATING, LARGE)
    ]


def setting(found: Found, more: str) -> str:
    first = next(iter(found))
    steps = ", ".join(f"{steps:,}" for steps in sorted({cell.steps for cell in found}))
    return f"{first.model} on {first.data}, {steps} steps, one seed, in one process; {more}."


def _show_workers(found: Found) -> Shown:
    panels, lines, differences = [], [], []
    for name, (momentum, _) in _RATES.items():
        mine = {cell: finding for cell, finding in found.items() if cell.momentum == momentum}
        accuracy = {(cell.workers, cell.design): finding.accuracy for cell, finding in mine.items()}
        counts = sorted({workers for workers, _ in accuracy})
        series = [
            Series(label=NAMES[design], x=counts, y=[100 * accuracy[each, design] for each in counts])
            for design in (FLOATING, TERNARY)
        ]
        panels.append(Panel(title=name, x_label="workers", y_label="test accuracy, %", series=series, x_log=True))
        for each in counts:
            floating, ternary = accuracy[each, FLOATING], accuracy[each, TERNARY]
            differences.append(100 * (ternary - floating))
            lines.append([name, str(each), f"{floating:.2%}", f"{ternary:.2%}", f"{differences[-1]:+.2f}"])
    header = ["optimizer", "workers", "floating", "TernGrad", "difference, points"]
    summary = [
        ["largest gain", "0.15 points", f"{max(differences):.2f} points"],
        ["largest loss", "0.22 points", f"{-min(differences):.2f} points"],
    ]
    return Shown(
        setting=setting(found, "total batch 64, polynomial decay of power 0.5 to 0, weight decay 0.0005"),
        tables=[Table(["", "paper", "ours"], summary), Table(header, lines, "Accuracy by number of workers", left=1)],
        charts=[Chart(name="terngrad-figure-3", caption="Test accuracy by number of workers.", panels=panels)],
    )


def _show_curves(found: Mapping[RecipeCell, CurvesFinding]) -> Shown:
    loss, accuracy, zeros, lines = [], [], [], []
    for cell, finding in found.items():
        label = NAMES[cell.design]
        x, y = smooth(finding.history.losses, most=100)
        loss.append(Series(label=label, x=x, y=y))
        steps, scores = zip(*finding.evaluations, strict=True)
        accuracy.append(Series(label=label, x=list(steps), y=[100 * score for score in scores]))
        share = "–"
        if cell.design == LARGE:
            share = f"{sum(finding.zeros) / len(finding.zeros):.2%}"
            x, shares = smooth(finding.zeros, most=100)
            zeros.append(Series(label=label, x=x, y=[100 * each for each in shares]))
        lines.append([label, f"{finding.accuracy:.2%}", f"{y[-1]:.3f}", share, "71.32 %" if zeros else "–"])
    panels = [
        Panel(title="(a)", x_label="step", y_label="test accuracy, %", series=accuracy),
        Panel(title="(b)", x_label="step", y_label="training loss, nats", series=loss),
        Panel(title="(c)", x_label="step", y_label="zeros in the first matrix's gradient, %", series=zeros),
    ]
    return Shown(
        setting=setting(found, "4 workers, total batch 512, momentum SGD from 0.02, polynomial decay"),
        tables=[Table(["gradients", "accuracy at the end", "loss at the end", "zeros", "in the paper"], lines)],
        charts=[Chart(name="terngrad-figure-4", caption="Accuracy, training loss and zeros by step.", panels=panels)],
        notes=[
            "The paper's curves of AlexNet match each other. Zeros are those of worker 0's own scale in the first "
            "fully connected layer, the paper's fc6."
        ],
    )


_entry = scaled("terngrad", SCALED)
ENTRIES = (
    _entry("figure-3", "accuracy by number of workers, momentum and vanilla SGD", 4, _workers_cells, _show_workers),
    _entry("figure-4", "accuracy, loss and zeros by step", 2, _curve_cells, _show_curves),
)
