"""DoubleSqueeze (Tang et al. 2019): its figures, what its theorem says of many workers, and the model as one vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from thinwire.presentation.charts import Series, smooth
from thinwire.presentation.tables import Table
from thinwire_lab.studies.deviation import deviation, spread
from thinwire_lab.studies.reproduce.entry import Entry, Scale, Shown, chart, scaled, seeds
from thinwire_lab.studies.reproduce.iteration_times import timed_entry
from thinwire_lab.studies.reproduce.job_cells import TrainingFinding
from thinwire_lab.studies.reproduce.plain_sgd import ONE_BIT, SGD, TOP_K, PlainCell, pair
from thinwire_lab.studies.reproduce.speedup import SPEEDUP
from thinwire_lab.workloads.data import data

Found = Mapping[PlainCell, TrainingFinding]

SCALED = (
    "The paper: ResNet-18 on CIFAR-10, 8 workers of 256 examples, more than 160 epochs, one GPU each. On an easier "
    "task training loss tells methods apart where accuracy does not."
)
VECTOR_SCALED = "As for figures 1 to 5, of which it shares the runs with a tensor at a time."

_LR = {"mlp": 0.2, "lenet5": 0.1}
_STEPS: dict[Scale, int] = {"tiny": 6, "quick": 600, "full": 2500}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 1, "full": 3}
_PRINTED = {
    "DoubleSqueeze": "like SGD",
    "MEM-SGD": "like SGD",
    "QSGD": "much slower than SGD",
    "Top-k SGD": "a little slower",
}


def trainings(methods: Sequence[str], scale: Scale, *, vector: bool = False) -> list[PlainCell]:
    """Returns the runs of some methods, seed by seed; with `vector` the model is one vector, with one k and scale."""
    model, examples = pair(scale)
    return [
        PlainCell.of(
            method,
            model=f"{model}-vector" if vector else model,
            data=examples,
            workers=2 if scale == "tiny" else 8,
            steps=_STEPS[scale],
            eval_steps=max(1, _STEPS[scale] // 12),
            lr=_LR[model],
            seed=seed,
        )
        for seed in range(_SEEDS[scale])
        for method in methods
    ]


def final_loss(finding: TrainingFinding) -> float:
    """Returns the training loss over the last tenth of the steps."""
    losses = finding.history.losses
    return fmean(losses[-max(1, len(losses) // 10) :])


def setting(found: Found) -> str:
    """Returns in a sentence what was run."""
    first, finding = next(iter(found.items()))
    models = " and ".join(sorted({cell.model for cell in found}))
    return (
        f"{models} on {first.data}, {first.workers} workers of {finding.batch} examples and a server, {first.steps:,} "
        f"steps ({first.steps / _steps_per_epoch(first, finding):.1f} epochs), plain SGD at {finding.lr:g} and a tenth "
        f"of it after two thirds, {seeds(found)}, in one process."
    )


def _steps_per_epoch(cell: PlainCell, finding: TrainingFinding) -> int:
    return len(data(cell.data).train_x) // cell.workers // finding.batch


def _of(found: Found, method: str, *, vector: bool = False) -> list[tuple[PlainCell, TrainingFinding]]:
    return [(c, f) for c, f in found.items() if c.method == method and c.model.endswith("-vector") == vector]


def _loss_curve(found: Found, method: str) -> Series:
    runs = _of(found, method)
    epoch = _steps_per_epoch(*runs[0])
    mean = [fmean(step) for step in zip(*(finding.history.losses for _, finding in runs), strict=True)]
    x, y = smooth(mean, most=60)
    return Series(label=method, x=[each / epoch for each in x], y=y)


def _accuracy_curve(found: Found, method: str) -> Series:
    runs = _of(found, method)
    epoch = _steps_per_epoch(*runs[0])
    scores = [[100 * each[1] for each in point] for point in zip(*(f.evaluations for _, f in runs), strict=True)]
    return Series(
        label=method,
        x=[step / epoch for step, _ in runs[0][1].evaluations],
        y=[fmean(each) for each in scores],
        error=[deviation(each) for each in scores] if len(runs) > 1 else None,
    )


def _printed(method: str) -> str:
    return next((text for start, text in _PRINTED.items() if method.startswith(start)), "the baseline")


def _show_losses(item: str, methods: Sequence[str], found: Found) -> Shown:
    base = fmean(final_loss(finding) for _, finding in _of(found, SGD))
    lines = []
    for method in methods:
        losses = [final_loss(finding) for _, finding in _of(found, method)]
        loss = fmean(losses)
        lines.append([method, _printed(method), f"{loss:.4f}{spread(losses, 4)}", f"{loss / base:.2f}×"])
    return Shown(
        setting=setting(found),
        tables=[Table(["", "paper", "loss at the end", "of SGD's"], lines, "Training loss")],
        charts=[
            chart(
                *(
                    f"doublesqueeze-{item}",
                    "Training loss by epoch.",
                    [_loss_curve(found, method) for method in methods],
                ),
                *("epoch", "training loss (nats)"),
                y_log=True,
            )
        ],
        notes=[
            "The paper prints no numbers; its words stand in the table. The loss at the end is the mean over the last "
            "tenth of the steps; other seeds of one method differ by less than a factor of 1.25."
        ],
    )


def _show_accuracies(item: str, methods: Sequence[str], found: Found) -> Shown:
    base = [100 * finding.accuracy for _, finding in _of(found, SGD)]
    lines = []
    for method in methods:
        findings = [finding for _, finding in _of(found, method)]
        scores = [100 * finding.accuracy for finding in findings]
        push, pull = (fmean(getattr(each, name) for each in findings) for name in ("bits_push", "bits_pull"))
        lag = fmean(each.lag for each in findings)
        lines.append(
            [
                *(method, _printed(method)),
                *(f"{fmean(scores):.2f}{spread(scores, 2)}", f"{fmean(scores) - fmean(base):+.2f}"),
                *(f"{push:.2f}", f"{pull:.2f}", f"{lag:.1f}" if lag else "–"),
            ]
        )
    header = ["", "paper", "accuracy (%)", "against SGD", "bits up", "bits down", "lag (steps)"]
    series = [_accuracy_curve(found, method) for method in methods]
    return Shown(
        setting=setting(found),
        tables=[Table(header, lines, "Test accuracy at the end")],
        charts=[chart(f"doublesqueeze-{item}", "Test accuracy by epoch.", series, "epoch", "test accuracy (%)")],
        notes=["Bits count the whole payload. The lag is the largest residual at the end, in updates of one step."],
    )


_FIGURES: dict[str, tuple[Callable[[TrainingFinding], float], str]] = {
    "loss": (final_loss, ".4f"),
    "accuracy (%)": (lambda each: 100 * each.accuracy, ".2f"),
    "bits up": (lambda each: each.bits_push, ".2f"),
    "lag": (lambda each: each.lag, ".1f"),
}
_VECTORED = ("DoubleSqueeze 1-bit", "DoubleSqueeze top-k", "MEM-SGD top-k", "Top-k SGD")


def _show_vector(found: Found) -> Shown:
    lines, bars = [], []
    for title, vector in (("a tensor at a time", False), ("one vector", True)):
        names = [method for method in _VECTORED if _of(found, method, vector=vector)]
        losses = [fmean(final_loss(each) for _, each in _of(found, name, vector=vector)) for name in names]
        bars.append(Series(label=title, x=names, y=losses))
    ways = {"tensor": False, "vector": True}
    for method in _VECTORED:
        both = [[finding for _, finding in _of(found, method, vector=vector)] for vector in ways.values()]
        lines.append([method, *(_figure(name, findings) for name in _FIGURES for findings in both)])
    header = ["", *(f"{name}, {way}" for name in _FIGURES for way in ways)]
    return Shown(
        setting=setting(found),
        tables=[Table(header, lines, "k, or one scale, of each tensor and of the whole model")],
        charts=[
            chart(
                *("doublesqueeze-one-vector", "Training loss at the end.", bars, "", "training loss at the end (nats)"),
                kind="bars",
            )
        ],
        notes=[
            "The paper's k and scale are of the whole model as one vector. thinwire's codecs see one tensor at a time; "
            "a model with one parameter vector (`--model mlp-vector`, `lenet5-vector`) gives the paper's choice."
        ],
    )


def _figure(name: str, findings: Sequence[TrainingFinding]) -> str:
    figure, form = _FIGURES[name]
    value = fmean(figure(each) for each in findings)
    return format(value, form) if value else "–"


def _curves(
    number: int, methods: Sequence[str], show: Callable[[str, Sequence[str], Found], Shown], what: str
) -> Entry:
    item = f"figure-{number}"
    return scaled("doublesqueeze", SCALED)(
        item, what, 1, lambda scale: trainings(methods, scale), lambda found: show(item, methods, found)
    )


ENTRIES = (
    _curves(1, ONE_BIT, _show_losses, "training loss by epoch, 1 bit"),
    _curves(2, ONE_BIT, _show_accuracies, "test accuracy by epoch, 1 bit"),
    timed_entry(3, ONE_BIT, "seconds per iteration by bandwidth, 1 bit"),
    _curves(4, TOP_K, _show_losses, "training loss by epoch, top-k"),
    _curves(5, TOP_K, _show_accuracies, "test accuracy by epoch, top-k"),
    timed_entry(6, TOP_K, "seconds per iteration by bandwidth, top-k"),
    scaled("doublesqueeze", VECTOR_SCALED)(
        "one-vector",
        "k of the whole model, as in the paper, beside k of each tensor",
        1,
        lambda scale: [*trainings(_VECTORED, scale), *trainings(_VECTORED, scale, vector=True)],
        _show_vector,
    ),
    SPEEDUP,
)
