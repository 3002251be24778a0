"""3LC's runs, and its table 1 and figures 3 and 5: measured accuracies, and modelled seconds (§4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.reproduce.entry import Cell, Found, Scale, Shown
from thinwire_lab.studies.reproduce.job_cells import MESSAGES, TimingCell, TrainingCell, TrainingFinding, stand_in

MULTIPLIERS = ("1.0", "1.5", "1.75", "1.9")
LINKS = ("10mbit", "100mbit", "1gbit")
SCALED = (
    "The paper: ResNet-110 on CIFAR-10, 10 workers, 25,600 steps, one GPU each. A smaller model has another share of "
    "zeros, and few steps leave more to learn."
)
# One rate for all rows: at the recipe's 0.02 the largest multiplier does not train LeNet-5.
_RATE = {"lenet5": 0.01, "mlp": 0.02}
_STEPS: dict[Scale, int] = {"tiny": 12, "quick": 500, "full": 8000}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 1, "full": 3}
_WORKERS: dict[Scale, int] = {"tiny": 2, "quick": 4, "full": 10}
_SHORT = 10  # A timed run has this part, a tenth, of the steps, and sweeps the whole schedule of rates (§4.3)


def by_multiplier(multiplier: str) -> str:
    return f"3lc[s={multiplier}]"


def _shared(scale: Scale) -> dict[str, Any]:
    model, data = stand_in(scale, ("lenet5", "fashion-mnist" if scale == "full" else "fashion-mnist[test=2000]"))
    return {"model": model, "data": data, "workers": _WORKERS[scale], "lr": _RATE[model]}


def trainings(designs: Sequence[str], scale: Scale, *, share: float = 1.0) -> list[TrainingCell]:
    """Returns the runs of some designs with a share of the standard steps, seed by seed."""
    steps = max(4, round(_STEPS[scale] * share))
    shared = _shared(scale) | {"steps": steps, "eval_steps": max(2, steps // 10)}
    return [TrainingCell(design=design, seed=seed, **shared) for seed in range(_SEEDS[scale]) for design in designs]


def timings(designs: Sequence[str], scale: Scale, links: Sequence[str] = LINKS) -> list[TimingCell]:
    """Returns the runs that seconds per step come from."""
    shared = _shared(scale) | {"steps": max(6, _STEPS[scale] // _SHORT)}
    return [TimingCell(design=design, link=link, **shared) for link in links for design in designs]


def setting(found: Found) -> str:
    """Returns in sentences what was run: seconds are of other runs than accuracies, and shorter ones."""
    runs = found.of(TrainingCell)
    first, finding = runs.first
    groups = dict.fromkeys(f"{cell.workers} workers of {each.batch} examples" for cell, each in runs.items())
    steps = ", ".join(f"{steps:,}" for steps in sorted(runs.each("steps")))
    timed = "".join(
        f" Seconds: one run of {steps:,} steps on each link." for steps in found.of(TimingCell).each("steps")
    )
    return (
        f"{first.model} on {first.data}, {' and '.join(groups)}, {steps} steps, cosine "
        f"decay from {finding.lr:g}, {runs.seeds}, in one process.{timed}"
    )


PRINTED: dict[str, tuple[float, float, float, float]] = {
    "fp32": (1, 1, 1, 93.37),
    "int8": (3.62, 3.47, 1.51, 93.33),
    "stoch3": (12.3, 7.51, 1.53, 92.06),
    "mqe1": (14.6, 7.40, 1.30, 93.21),
    "sparse5": (8.98, 6.62, 1.44, 92.87),
    "local2": (1.92, 1.87, 1.38, 93.03),
    "3lc[s=1.0]": (15.9, 7.97, 1.53, 93.32),
    "3lc[s=1.5]": (20.9, 8.70, 1.53, 93.29),
    "3lc[s=1.75]": (22.8, 9.04, 1.53, 93.51),
    "3lc[s=1.9]": (22.8, 9.22, 1.55, 93.10),
}
"""Of table 1, by design: speed-up at 10 Mbit/s, 100 Mbit/s and 1 Gbit/s, and accuracy in percent."""
SHARES = (0.25, 0.5, 0.75, 1.0)
_DRAWN = ("fp32", "int8", "stoch3", "sparse5", "3lc[s=1.0]", "3lc[s=1.75]")
_MODELLED = (
    "Seconds are modelled: real bytes and codecs, the processor's seconds as measured here, a processor for each "
    f"process, and computed links; nothing was sent over a link. {MESSAGES}"
)


def _seconds(found: Found, design: str, link: str) -> float:
    return found.of(TimingCell).where(design=design, link=link).mean(lambda each: each.seconds_per_step)


def _accuracy(finding: TrainingFinding) -> float:
    return 100 * finding.accuracy


def _show_table_1(found: Found) -> Shown:
    lines, runs = [], found.of(TrainingCell)
    base = runs.where(design="fp32").mean(_accuracy)
    for design, (*speedups, printed) in PRINTED.items():
        accuracy = runs.where(design=design).mean(_accuracy)
        cells = []
        for link, speedup in zip(LINKS, speedups, strict=True):
            cells += [f"{speedup:g}", f"{_seconds(found, 'fp32', link) / _seconds(found, design, link):.2f}"]
        differences = [f"{printed - 93.37:+.2f}", f"{accuracy - base:+.2f}"]
        lines.append([design, *cells, f"{printed:.2f}", f"{accuracy:.2f}", *differences])
    header = ["design"]
    for link in LINKS:
        header += [f"× at {link}, paper", "ours, modelled"]
    header += ["accuracy %, paper", "ours, measured", "difference, paper", "ours"]
    return Shown(
        setting=setting(found),
        tables=[Table(header, lines, "Speed-up over the baseline, and test accuracy")],
        notes=[_MODELLED],
    )


def _show_times(name: str, designs: Sequence[str], links: Sequence[str], note: str, found: Found) -> Shown:
    """A panel for each link, accuracy over training time at every share of the steps, and a table of the same."""
    runs, panels, lines = found.of(TrainingCell), [], []
    budgets = sorted(runs.each("steps"))
    for link in links:
        series = []
        for design in designs:
            times = [steps * _seconds(found, design, link) for steps in budgets]
            accuracies = [runs.where(design=design, steps=steps).mean(_accuracy) for steps in budgets]
            series.append(Series(label=design, x=times, y=accuracies))
            lines.append([f"{design}, {link}", *(f"{t:.3g} s" for t in times), *(f"{a:.2f}" for a in accuracies)])
        label = "training time (s), modelled"
        panels.append(Panel(title=link, x_label=label, y_label="test accuracy (%)", series=series, x_log=True))
    shares = [f"{share:.0%}" for share in SHARES]
    header = ["", *(f"time, {each}" for each in shares), *(f"accuracy %, {each}" for each in shares)]
    return Shown(
        setting=setting(found),
        tables=[Table(header, lines, "Modelled time and measured accuracy by share of the standard steps")],
        charts=[Chart(name=name, caption="Accuracy by training time; a point is a run of its own.", panels=panels)],
        notes=[note, _MODELLED],
    )


def _budgets(designs: Sequence[str], links: Sequence[str], scale: Scale) -> list[Cell]:
    runs = [cell for share in SHARES for cell in trainings(designs, scale, share=share)]
    return [*dict.fromkeys(runs), *timings(designs, scale, links)]


_BY_MULTIPLIER = [by_multiplier(each) for each in MULTIPLIERS]
_NOTE_3 = "The paper: 3LC with s = 1.75 is best with all steps, with s = 1.0 better with fewer."
_NOTE_5 = "The paper: a high multiplier takes less time and converges more slowly; s = 1.9 ends lower than the others."

TABLE_1 = lambda scale: [*trainings(list(PRINTED), scale), *timings(list(PRINTED), scale)], _show_table_1
FIGURE_3 = partial(_budgets, _DRAWN, LINKS), partial(_show_times, "3lc-figure-3", _DRAWN, LINKS, _NOTE_3)
FIGURE_5 = (
    partial(_budgets, _BY_MULTIPLIER, LINKS[:1]),
    partial(_show_times, "3lc-figure-5", _BY_MULTIPLIER, LINKS[:1], _NOTE_5),
)
"""How each item is made: its cells and what shows them."""
