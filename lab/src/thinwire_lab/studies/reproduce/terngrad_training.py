"""TernGrad's trainings: of a LeNet by number of workers and by step, and of CifarNet with Adam (§4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from thinwire.codecs import codec, decode
from thinwire.presentation.charts import Chart, Panel, Series, smooth
from thinwire.presentation.tables import Table
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.jobs.job import Job
from thinwire_lab.studies.reproduce.entry import Found, Scale, Shown, scaled
from thinwire_lab.studies.reproduce.job_cells import Pair, TrainingCell, TrainingFinding, stand_in, train

FLOATING, TERNARY = "fp32", "terngrad[last_layer=same]"
"""In §4.1 the last layer is ternary, too; §4.2 keeps it in float for large networks."""
LARGE = "terngrad"
NAMES = {FLOATING: "floating", TERNARY: "TernGrad", LARGE: "TernGrad"}
SCALED = (
    "The paper: LeNet on MNIST and AlexNet on ImageNet, accuracies of averaged parameters. Fashion-MNIST leaves more "
    "errors than MNIST, so that differences are larger; the trained parameters themselves are evaluated."
)
_TOTAL_BATCH = 64
_WORKERS: dict[Scale, tuple[int, ...]] = {"tiny": (2,), "quick": (2, 16, 64), "full": (2, 4, 8, 16, 32, 64)}
_STEPS: dict[Scale, int] = {"tiny": 4, "quick": 150, "full": 10_000}
_RATES = {"momentum SGD": (0.9, 0.01), "vanilla SGD": (0.0, 0.1)}  # momentum and base rate (§4.1)
_CURVE_WORKERS, _CURVE_BATCH = 4, 128
_CURVE_STEPS: dict[Scale, int] = {"tiny": 4, "quick": 60, "full": 2_400}


class RecipeCell(TrainingCell, frozen=True, kw_only=True):
    """A training by the paper's recipe."""

    optimizer: str = "SGD"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "polynomial"
    final: float = 0.0

    def job(self, **more: Any) -> Job:
        """Returns the run; only SGD has a momentum."""
        return super().job(**({} if self.optimizer == "SGD" else {"momentum": None}) | more)


class CurvesFinding(TrainingFinding, frozen=True, kw_only=True):
    """The results of a training, and by step the share of zeros in worker 0's ternary gradient of the first matrix."""

    zeros: list[float]


class CurvesCell(RecipeCell, frozen=True, kw_only=True, tag="RecipeCell"):
    """A training with counted zeros; other entries use its run as a plain one."""

    finding = CurvesFinding

    def run(self, tell: Tell) -> CurvesFinding:
        coder, zeros = codec("terngrad"), []

        def on_step(rank: int, step: int, loss: float, model: nn.Module) -> None:
            gradient = next(each.grad for each in model.parameters() if each.ndim == 2)
            if rank == 0 and gradient is not None:
                values = torch.as_tensor(decode(coder.encode(gradient, key=coder.key(self.seed, "zeros", step))))
                zeros.append(float((values == 0).float().mean()))

        return CurvesFinding(**msgspec.structs.asdict(train(self, tell, on_step=on_step)), zeros=zeros)


def pair(scale: Scale) -> Pair:
    return stand_in(scale, ("lenet", "fashion-mnist"))


def _workers_cells(scale: Scale) -> Sequence[RecipeCell]:
    model, data = pair(scale)
    shared: dict[str, Any] = {"model": model, "data": data, "steps": _STEPS[scale], "eval_steps": 0}
    return [
        RecipeCell(design=design, workers=workers, batch=_TOTAL_BATCH // workers, lr=rate, momentum=momentum, **shared)
        for workers in _WORKERS[scale]
        for momentum, rate in _RATES.values()
        for design in (FLOATING, TERNARY)
    ]


def _curve_cells(scale: Scale) -> Sequence[CurvesCell]:
    model, data = pair(scale)
    steps, batch = _CURVE_STEPS[scale], 16 if scale == "tiny" else _CURVE_BATCH
    shared: dict[str, Any] = {"workers": _CURVE_WORKERS, "batch": batch, "eval_steps": max(2, steps // 12), "lr": 0.02}
    return [CurvesCell(design=each, model=model, data=data, steps=steps, **shared) for each in (FLOATING, LARGE)]


def _setting(found: Found, more: str) -> str:
    first, _ = found.first
    steps = ", ".join(f"{steps:,}" for steps in sorted(found.each("steps")))
    return f"{first.model} on {first.data}, {steps} steps, one seed, in one process; {more}."


def _show_workers(found: Found) -> Shown:
    panels, lines, differences = [], [], []
    for name, (momentum, _) in _RATES.items():
        mine = found.where(momentum=momentum)
        accuracy = {(cell.workers, cell.design): finding.accuracy for cell, finding in mine.items()}
        counts = sorted(mine.each("workers"))
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
        setting=_setting(found, "total batch 64, polynomial decay of power 0.5 to 0, weight decay 0.0005"),
        tables=[Table(["", "paper", "ours"], summary), Table(header, lines, "Accuracy by number of workers", left=1)],
        charts=[Chart(name="terngrad-figure-3", caption="Test accuracy by number of workers.", panels=panels)],
    )


def _show_curves(found: Found) -> Shown:
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
        setting=_setting(found, "4 workers, total batch 512, momentum SGD from 0.02, polynomial decay"),
        tables=[Table(["gradients", "accuracy at the end", "loss at the end", "zeros", "in the paper"], lines)],
        charts=[Chart(name="terngrad-figure-4", caption="Accuracy, training loss and zeros by step.", panels=panels)],
        notes=[
            "The paper's curves of AlexNet match each other. Zeros are those of worker 0's own scale in the first "
            "fully connected layer, the paper's fc6."
        ],
    )


ADAM_SCALED = (
    "The paper: CifarNet on CIFAR-10 for 300,000 and 18,750 steps, images augmented, accuracies of averaged "
    "parameters. Here it trains for fewer steps, on Fashion-MNIST where CIFAR-10 is not installed, and the trained "
    "parameters themselves are evaluated."
)
# Total batch, workers, steps, and accuracies, floating and TernGrad: the paper's.
_PAPER = ((128, 2, 300_000, 86.56, 85.64), (2048, 16, 18_750, 83.19, 82.80))
_ADAM_STEPS: dict[Scale, int] = {"tiny": 32, "quick": 64, "full": 800}  # of the small batch
_DECAY = 0.004
"""From the authors' code, which decays the hidden fully connected layers alone; here for all matrices and filters."""


def adam_pair(scale: Scale) -> Pair:
    return stand_in(scale, ("cifarnet", "cifar10[crop=24]"), ("cifarnet", "fashion-mnist"))


def _adam_cells(scale: Scale) -> Sequence[RecipeCell]:
    model, data = adam_pair(scale)
    shared: dict[str, Any] = {"optimizer": "Adam", "lr": 2e-4, "weight_decay": _DECAY, "schedule": "constant"}
    shared["eval_steps"] = 0
    cells = []
    for total, workers, steps, *_ in _PAPER:
        batch = 16 if data == "digits" else total // workers
        own = {"workers": workers, "steps": max(2, _ADAM_STEPS[scale] * steps // _PAPER[0][2]), "batch": batch}
        cells += [RecipeCell(design=each, model=model, data=data, **shared | own) for each in (FLOATING, TERNARY)]
    return cells


def _against(accuracy: float, base: float, design: str) -> str:
    return f" ({accuracy - base:+.2f})" if design == TERNARY else ""


def _show_adam(found: Found) -> Shown:
    lines = []
    for _, workers, steps, *printed in _PAPER:
        ours = {cell.design: (cell, finding) for cell, finding in found.where(workers=workers).items()}
        base = ours[FLOATING][1].accuracy
        for design, paper in zip((FLOATING, TERNARY), printed, strict=True):
            cell, finding = ours[design]
            lines.append(
                [
                    *(f"{finding.batch * workers:,}", str(workers), f"{steps:,}", f"{cell.steps:,}", NAMES[design]),
                    f"{paper:.2f} %{_against(paper, printed[0], design)}",
                    f"{finding.accuracy:.2%}{_against(100 * finding.accuracy, 100 * base, design)}",
                ]
            )
    first, _ = found.first
    header = ["total batch", "workers", "steps, paper", "steps, ours", "gradients", "paper", "ours"]
    return Shown(
        setting=_setting(found, f"Adam at {first.lr:g}, weight decay {first.weight_decay:g}, equal epochs"),
        tables=[Table(header, lines, f"Adam; paper: cifarnet on cifar10; ours: {first.model} on {first.data}", left=0)],
        notes=["The ratio of steps is the paper's: as many images with either batch."],
    )


ENTRIES = (
    *scaled(
        *("terngrad", SCALED),
        ("figure-3", "accuracy by number of workers, momentum and vanilla SGD", 4, _workers_cells, _show_workers),
        ("figure-4", "accuracy, loss and zeros by step", 2, _curve_cells, _show_curves),
    ),
    *scaled(
        *("terngrad", ADAM_SCALED),
        ("table-1", "CifarNet with Adam, a small and a large batch", 2.5, _adam_cells, _show_adam),
    ),
)
