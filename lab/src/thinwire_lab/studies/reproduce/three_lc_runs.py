"""3LC's runs: which model and data stand in for ResNet-110 and CIFAR-10, for how long, and means over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from thinwire.quantities import counted
from thinwire_lab.studies.reproduce.entry import Scale
from thinwire_lab.studies.reproduce.stand_ins import Pair, stand_in
from thinwire_lab.studies.reproduce.timings import TimingCell
from thinwire_lab.studies.reproduce.trainings import TrainingCell, TrainingFinding

Found = Mapping[TrainingCell, TrainingFinding]

MULTIPLIERS = ("1.0", "1.5", "1.75", "1.9")
LINKS = ("10mbit", "100mbit", "1gbit")
SCALED = (
    "The paper: ResNet-110 on CIFAR-10, 10 workers, 25,600 steps, one GPU each. A smaller model has larger gradients "
    "beside its noise and fewer tensors, which changes the share of zeros, and few steps leave more to learn."
)
# One rate for all rows: at the recipe's 0.02 the largest multiplier does not train LeNet-5.
_RATE = {"lenet5": 0.01, "mlp": 0.02}
_STEPS: dict[Scale, int] = {"tiny": 12, "quick": 500, "full": 8000}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 1, "full": 3}
_WORKERS: dict[Scale, int] = {"tiny": 2, "quick": 4, "full": 10}
_SHORT = 10
"""A timed run has this part, a tenth, of the steps, and sweeps the whole schedule of rates (§4.3)."""


def by_multiplier(multiplier: str) -> str:
    """Returns the design with this sparsity multiplier."""
    return f"3lc[s={multiplier}]"


def _pair(scale: Scale) -> Pair:
    """What stands in for ResNet-110 and CIFAR-10."""
    return stand_in(scale, ("lenet5", "fashion-mnist" if scale == "full" else "fashion-mnist[test=2000]"))


def trainings(designs: Sequence[str], scale: Scale, *, share: float = 1.0) -> list[TrainingCell]:
    """Returns the runs of some designs, seed by seed.

    Args:
        designs: names.
        scale: how long.
        share: of the standard steps; the schedule of rates belongs to each number of steps (§4.4).
    """
    model, data = _pair(scale)
    steps = max(4, round(_STEPS[scale] * share))
    return [
        TrainingCell(
            design=design,
            model=model,
            data=data,
            workers=_WORKERS[scale],
            steps=steps,
            eval_steps=max(2, steps // 10),
            lr=_RATE[model],
            seed=seed,
        )
        for seed in range(_SEEDS[scale])
        for design in designs
    ]


def timings(designs: Sequence[str], scale: Scale, links: Sequence[str] = LINKS) -> list[TimingCell]:
    """Returns the runs that seconds per step come from."""
    model, data = _pair(scale)
    steps = max(6, _STEPS[scale] // _SHORT)
    return [
        TimingCell(
            design=design,
            model=model,
            data=data,
            workers=_WORKERS[scale],
            link=link,
            steps=steps,
            lr=_RATE[model],
        )
        for link in links
        for design in designs
    ]


def setting(found: Found) -> str:
    """Returns in a sentence what was run."""
    first, finding = next(iter(found.items()))
    groups = dict.fromkeys(f"{cell.workers} workers of {each.batch} examples" for cell, each in found.items())
    seeds = counted(len({cell.seed for cell in found}), "seed")
    steps = ", ".join(f"{steps:,}" for steps in sorted({cell.steps for cell in found}))
    return (
        f"{first.model} on {first.data}, {' and '.join(groups)}, {steps} steps, cosine "
        f"decay from {finding.lr:g}, {seeds}, in one process."
    )


def mean(found: Found, design: str, figure: Callable[[TrainingFinding], float], *, steps: int | None = None) -> float:
    """Returns a figure's mean over the seeds of a design; of the runs with so many steps, where those are given."""
    return fmean(
        figure(finding) for cell, finding in found.items() if cell.design == design and steps in (None, cell.steps)
    )
