"""3LC (Lim, Andersen, Kaminsky 2019): its tables and figures.

The paper trains ResNet-110 on CIFAR-10 with ten GPUs. Here LeNet-5 trains on Fashion-MNIST, or a small perceptron on
the digits where Fashion-MNIST is not installed, with as many workers as the scale says; all entries share the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from thinwire.jobs.tables import Table
from thinwire.studies.reproduce.charts import Chart, Panel, Series, smooth
from thinwire.studies.reproduce.entry import Entry, Scale, Shown, Study
from thinwire.studies.reproduce.trainings import TrainingCell, TrainingFinding, train
from thinwire.workloads.data import datasets

Found = Mapping[TrainingCell, TrainingFinding]

MULTIPLIERS = ("1.0", "1.5", "1.75", "1.9")
NO_ZRE = "3lc[zero_run=false]"
SCALED = (
    "The paper: ResNet-110 on CIFAR-10, 10 workers, 25,600 steps, one GPU each. A smaller model has larger gradients "
    "beside its noise and fewer tensors, which changes the share of zeros, and few steps leave more to learn."
)
# One rate for all rows: at the recipe's 0.02 the largest multiplier does not train LeNet-5.
_RATE = {"lenet5": 0.01, "mlp": 0.02}
_STEPS: dict[Scale, int] = {"tiny": 12, "quick": 1000, "full": 8000}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 1, "full": 3}

# Ratio and bits of table 2, by multiplier.
_TABLE_2 = {NO_ZRE: (20.0, 1.60), "1.0": (39.4, 0.812), "1.5": (70.9, 0.451), "1.75": (107.0, 0.298)}
_TABLE_2 |= {"1.9": (160.0, 0.200)}
_CROSSOVER = 0.7


def trainings(designs: Sequence[str], scale: Scale, *, share: float = 1.0) -> list[TrainingCell]:
    """Returns the runs of some designs, seed by seed.

    Args:
        designs: names.
        scale: how long.
        share: of the standard steps; the schedule of rates belongs to each number of steps (§4.4).
    """
    present = any(info.name == "fashion-mnist" and info.present for info in datasets())
    model, data = ("lenet5", "fashion-mnist") if present and scale != "tiny" else ("mlp", "digits")
    steps = max(4, round(_STEPS[scale] * share))
    return [
        TrainingCell(
            design=design,
            model=model,
            data=data,
            workers=2 if scale == "tiny" else 4,
            steps=steps,
            eval_steps=max(2, steps // 10),
            lr=_RATE[model],
            seed=seed,
        )
        for seed in range(_SEEDS[scale])
        for design in designs
    ]


def setting(found: Found) -> str:
    """Returns in a sentence what was run."""
    first, finding = next(iter(found.items()))
    seeds = len({cell.seed for cell in found})
    steps = ", ".join(f"{steps:,}" for steps in sorted({cell.steps for cell in found}))
    return (
        f"{first.model} on {first.data}, {first.workers} workers of {finding.batch} examples, {steps} steps, cosine "
        f"decay from {finding.lr:g}, {seeds} {'seed' if seeds == 1 else 'seeds'}, in one process."
    )


def _name(multiplier: str) -> str:
    return f"3lc[s={multiplier}]"


def _mean(found: Found, design: str, figure: Callable[[TrainingFinding], float]) -> float:
    values = [figure(finding) for cell, finding in found.items() if cell.design == design]
    return sum(values) / len(values)


def _over_run(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _show_table_2(found: Found) -> Shown:
    lines, push, pull, printed = [], [], [], []
    rows = {NO_ZRE: NO_ZRE, **{each: _name(each) for each in MULTIPLIERS}}
    for label, design in rows.items():
        up = _mean(found, design, lambda each: _over_run(each.history.bits_push))
        down = _mean(found, design, lambda each: _over_run(each.history.bits_pull))
        everything = _mean(found, design, lambda each: each.compression_ratio)
        ratio, bits = _TABLE_2[label]
        push.append(up)
        pull.append(down)
        printed.append(bits)
        lines.append(
            [
                "No ZRE" if label == NO_ZRE else f"s = {label}",
                *(f"{ratio:g}×", f"{64 / (up + down):.1f}×", f"{bits:.3f}"),
                *(f"{(up + down) / 2:.3f}", f"{up:.3f}", f"{down:.3f}", f"{everything:.1f}×"),
            ]
        )
    header = ["", "ratio, paper", "ratio, ours", "bits, paper", "bits, ours", "push", "pull", "ratio, all tensors"]
    names = ["No ZRE", *MULTIPLIERS]
    bars = [Series(label="paper, both ways", x=names, y=printed, paper=True)]
    bars += [Series(label="push", x=names, y=push), Series(label="pull", x=names, y=pull)]
    panel = Panel(title="", x_label="sparsity multiplier", y_label="bits a value", series=bars, kind="bars")
    falls = all(a > b for values in (push, pull) for a, b in pairwise(values[1:]))
    order = "fall with s both ways, as in the paper" if falls else "do not fall with every step of s, as they do there"
    return Shown(
        setting=setting(found),
        tables=[Table(header, lines, "Average traffic compression")],
        charts=[Chart(name="3lc-table-2", caption="Payload bits a value of compressed tensors.", panels=[panel])],
        notes=[
            f"Bits {order}. Bits and ratio are of compressed tensors, as in the paper; the last column counts all that "
            "travels, biases and norm layers as well."
        ],
    )


def _show_figure_6(found: Found) -> Shown:
    panels, lines = [], []
    for multiplier in ("1.0", "1.75"):
        [*histories] = [each.history for cell, each in found.items() if cell.design == _name(multiplier)]
        steps = len(histories[0].losses)
        push = [_over_run([each.bits_push[step] for each in histories]) for step in range(steps)]
        pull = [_over_run([each.bits_pull[step] for each in histories]) for step in range(steps)]
        series = []
        for label, values in (("push", push), ("pull", pull)):
            x, y = smooth(values[1:], most=100)
            series.append(Series(label=label, x=[(1 + each) / steps for each in x], y=y))
        panels.append(
            Panel(title=f"s = {multiplier}", x_label="share of the steps", y_label="bits a value", series=series)
        )
        crossing = crossover(push[1:], pull[1:])
        ours = "pushes stay smaller" if crossing is None else f"{crossing:.0%} of the steps"
        lines.append([f"s = {multiplier}", f"about {_CROSSOVER:.0%} of the steps", ours])
    return Shown(
        setting=setting(found),
        tables=[Table(["pushes become larger than pulls after", "paper", "ours"], lines)],
        charts=[Chart(name="3lc-figure-6", caption="Compressed size per value by step.", panels=panels)],
        notes=[
            "The paper explains it so: a pull carries what many workers found and has fewer zeros; late in training "
            "gradients are mostly noise, without the few large values that make all others zero. The first step, "
            "whose pull nobody has averaged yet, is left out."
        ],
    )


def crossover(push: Sequence[float], pull: Sequence[float], windows: int = 50) -> float | None:
    """Returns the share of the run from which on pushes are larger than pulls to its end; None if they never are.

    Args:
        push, pull: bits by step.
        windows: the run is cut into so many, and means are compared.

    >>> crossover([1, 1, 3, 3], [2, 2, 2, 2], windows=4), crossover([1, 1], [2, 2])
    (0.5, None)
    """
    ups, downs = (smooth(values, most=windows)[1] for values in (push, pull))
    last = max((index for index, (up, down) in enumerate(zip(ups, downs, strict=True)) if up <= down), default=-1)
    return None if last == len(ups) - 1 else (last + 1) / len(ups)


def _study(designs: Sequence[str], show: Callable[[Found], Shown]) -> Study[TrainingCell, TrainingFinding]:
    return Study(cells=lambda scale: trainings(designs, scale), run=train, show=show, finding=TrainingFinding)


_SWEEP = [NO_ZRE, *map(_name, MULTIPLIERS)]

ENTRIES = (
    Entry(
        paper="3lc",
        item="figure-1",
        shows="point-to-point compression of two layers",
        status="drawing",
        why="explains compression contexts",
    ),
    Entry(paper="3lc", item="figure-2", shows="steps of the codec", status="drawing", why="explains the codec"),
    Entry(paper="3lc", item="table-1", shows="speed-up on three links, and accuracy, of eleven designs"),
    Entry(paper="3lc", item="figure-3", shows="training time and accuracy at 25 to 100 % of the steps, three links"),
    Entry(paper="3lc", item="figure-4", shows="training loss and test accuracy by step"),
    Entry(paper="3lc", item="figure-5", shows="training time and accuracy by sparsity multiplier"),
    Entry(
        paper="3lc",
        item="table-2",
        shows="compression ratio and bits by sparsity multiplier",
        status="scaled",
        why=SCALED,
        minutes=2,
        study=_study(_SWEEP, _show_table_2),
    ),
    Entry(
        paper="3lc",
        item="figure-6",
        shows="compressed size per value by step, push and pull",
        status="scaled",
        why=SCALED,
        minutes=1,
        study=_study([_name("1.0"), _name("1.75")], _show_figure_6),
    ),
)
