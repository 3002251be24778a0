"""TernGrad's table 1 (§4.1): CifarNet with Adam, a small batch and a large one."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.presentation.tables import Table
from thinwire_lab.studies.reproduce.entry import Scale, Shown, scaled
from thinwire_lab.studies.reproduce.stand_ins import Pair, stand_in
from thinwire_lab.studies.reproduce.terngrad_training import FLOATING, NAMES, TERNARY, Found, RecipeCell, setting

SCALED = (
    "The paper: CifarNet on CIFAR-10 for 300,000 and 18,750 steps, images augmented, accuracies of averaged "
    "parameters. Here it trains for fewer steps, on Fashion-MNIST where CIFAR-10 is not installed, and the trained "
    "parameters themselves are evaluated."
)
# Total batch, workers, steps, and accuracies, floating and TernGrad: the paper's.
_PAPER = ((128, 2, 300_000, 86.56, 85.64), (2048, 16, 18_750, 83.19, 82.80))
_STEPS: dict[Scale, int] = {"tiny": 32, "quick": 64, "full": 800}
"""Of the small batch."""
_DECAY = 0.004
"""Of the authors' code, and there for the hidden fully connected layers alone; here for all matrices and filters."""


def pair(scale: Scale) -> Pair:
    """Returns the model and the data of a scale."""
    return stand_in(scale, ("cifarnet", "cifar10[crop=24]"), ("cifarnet", "fashion-mnist"))


def _cells(scale: Scale) -> Sequence[RecipeCell]:
    model, data = pair(scale)
    return [
        RecipeCell(
            design=design,
            model=model,
            data=data,
            workers=workers,
            batch=16 if scale == "tiny" else total // workers,
            steps=max(2, _STEPS[scale] * steps // _PAPER[0][2]),
            eval_steps=0,
            lr=2e-4,
            optimizer="Adam",
            weight_decay=_DECAY,
            schedule="constant",
        )
        for total, workers, steps, *_ in _PAPER
        for design in (FLOATING, TERNARY)
    ]


def _against(accuracy: float, base: float, design: str) -> str:
    return f" ({accuracy - base:+.2f})" if design == TERNARY else ""


def _show(found: Found) -> Shown:
    lines = []
    for _, workers, steps, *printed in _PAPER:
        ours = {cell.design: (cell, finding) for cell, finding in found.items() if cell.workers == workers}
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
    first = next(iter(found))
    header = ["total batch", "workers", "steps, paper", "steps, ours", "gradients", "paper", "ours"]
    return Shown(
        setting=setting(found, f"Adam at {first.lr:g}, weight decay {first.weight_decay:g}, equal epochs"),
        tables=[Table(header, lines, f"Adam; paper: cifarnet on cifar10; ours: {first.model} on {first.data}", left=0)],
        notes=["The ratio of steps is the paper's: as many images with either batch."],
    )


ENTRY = scaled("terngrad", SCALED)("table-1", "CifarNet with Adam, a small and a large batch", 2.5, _cells, _show)
