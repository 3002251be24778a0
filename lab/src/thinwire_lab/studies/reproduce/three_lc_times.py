"""3LC's table 1 and figures 3 and 5: accuracy from full runs, time from short runs on each link (§4.3).

Accuracies are measured, seconds are modelled; they never share a column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.reproduce.entry import Cell, Finding, Scale, Shown, Study
from thinwire_lab.studies.reproduce.three_lc_runs import (
    LINKS,
    MULTIPLIERS,
    by_multiplier,
    mean,
    setting,
    timings,
    trainings,
)
from thinwire_lab.studies.reproduce.timings import MESSAGES, TimingCell, TimingFinding
from thinwire_lab.studies.reproduce.trainings import TrainingCell, TrainingFinding

Found = Mapping[Cell, Finding]

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


def _split(
    found: Found,
) -> tuple[dict[TrainingCell, TrainingFinding], dict[tuple[str, str], float]]:
    """Returns the trainings, and seconds per step by design and link."""
    runs = {c: f for c, f in found.items() if isinstance(c, TrainingCell) and isinstance(f, TrainingFinding)}
    timed = {c: f for c, f in found.items() if isinstance(c, TimingCell) and isinstance(f, TimingFinding)}
    return runs, {(cell.design, cell.link): finding.seconds_per_step for cell, finding in timed.items()}


def _setting(found: Found) -> str:
    """Returns in sentences what was run: seconds are of other runs than accuracies, and shorter ones."""
    [steps] = {cell.steps for cell in found if isinstance(cell, TimingCell)}
    return f"{setting(_split(found)[0])} Seconds: one run of {steps:,} steps on each link."


def _accuracy(finding: TrainingFinding) -> float:
    return 100 * finding.accuracy


def _show_table_1(found: Found) -> Shown:
    runs, seconds = _split(found)
    base = mean(runs, "fp32", _accuracy)
    lines, ours = [], {}
    for design, (*speedups, printed) in PRINTED.items():
        accuracy = mean(runs, design, _accuracy)
        cells = []
        for link, speedup in zip(LINKS, speedups, strict=True):
            ours[design, link] = seconds["fp32", link] / seconds[design, link]
            cells += [f"{speedup:g}", f"{ours[design, link]:.2f}"]
        differences = [f"{printed - 93.37:+.2f}", f"{accuracy - base:+.2f}"]
        lines.append([design, *cells, f"{printed:.2f}", f"{accuracy:.2f}", *differences])
    header = ["design"]
    for link in LINKS:
        header += [f"× at {link}, paper", "ours, modelled"]
    header += ["accuracy %, paper", "ours, measured", "difference, paper", "ours"]
    bars = [
        Series(label="paper", x=list(PRINTED), y=[row[0] for row in PRINTED.values()], role="paper"),
        Series(label="ours, modelled", x=list(PRINTED), y=[ours[design, LINKS[0]] for design in PRINTED]),
    ]
    panel = Panel(title="10 Mbit/s", x_label="", y_label="speed-up over float", series=bars, kind="bars")
    order = sorted(PRINTED, key=lambda design: PRINTED[design][0])
    turned = [f"{a} and {b}" for a, b in pairwise(order) if ours[a, LINKS[0]] > ours[b, LINKS[0]]]
    same = "is the paper's" if not turned else f"is the paper's but for {', '.join(turned)}"
    return Shown(
        setting=_setting(found),
        tables=[Table(header, lines, "Speed-up over the baseline, and test accuracy")],
        charts=[Chart(name="3lc-table-1", caption="Speed-up at 10 Mbit/s.", panels=[panel])],
        notes=[f"The order of the designs at 10 Mbit/s {same}.", _MODELLED],
    )


def _time_panels(found: Found, designs: Sequence[str], links: Sequence[str]) -> tuple[list[Panel], list[list[str]]]:
    """Returns a panel for each link, accuracy over training time at every share of the steps, and lines of a table."""
    runs, seconds = _split(found)
    panels, lines = [], []
    budgets = sorted({cell.steps for cell in runs})
    for link in links:
        series = []
        for design in designs:
            times = [steps * seconds[design, link] for steps in budgets]
            accuracies = [mean(runs, design, _accuracy, steps=steps) for steps in budgets]
            series.append(Series(label=design, x=times, y=accuracies))
            lines.append([f"{design}, {link}", *(f"{t:.3g} s" for t in times), *(f"{a:.2f}" for a in accuracies)])
        label = "training time (s), modelled"
        panels.append(Panel(title=link, x_label=label, y_label="test accuracy (%)", series=series, x_log=True))
    return panels, lines


def _show_times(name: str, designs: Sequence[str], links: Sequence[str], note: str) -> Callable[[Found], Shown]:
    def show(found: Found) -> Shown:
        panels, lines = _time_panels(found, designs, links)
        shares = [f"{share:.0%}" for share in SHARES]
        header = ["", *(f"time, {each}" for each in shares), *(f"accuracy %, {each}" for each in shares)]
        return Shown(
            setting=_setting(found),
            tables=[Table(header, lines, "Modelled time and measured accuracy by share of the standard steps")],
            charts=[Chart(name=name, caption="Accuracy by training time; a point is a run of its own.", panels=panels)],
            notes=[note, _MODELLED],
        )

    return show


def table_1() -> Study[Cell, Finding]:
    """Returns how table 1 is made."""
    designs = list(PRINTED)
    return Study(cells=lambda scale: [*trainings(designs, scale), *timings(designs, scale)], show=_show_table_1)


def figure_3() -> Study[Cell, Finding]:
    """Returns how figure 3 is made."""
    note = (
        "The paper: designs that end high with all steps need not with few; 3LC with s = 1.75 is best with all, with "
        "s = 1.0 better with fewer. At 100 Mbit/s 5 % sparsification is always better than stochastic values."
    )
    return _budgets(_DRAWN, LINKS, _show_times("3lc-figure-3", _DRAWN, LINKS, note))


def figure_5() -> Study[Cell, Finding]:
    """Returns how figure 5 is made."""
    designs = [by_multiplier(each) for each in MULTIPLIERS]
    note = "The paper: a high multiplier takes less time and converges more slowly; s = 1.9 ends lower than the others."
    return _budgets(designs, LINKS[:1], _show_times("3lc-figure-5", designs, LINKS[:1], note))


def _budgets(designs: Sequence[str], links: Sequence[str], show: Callable[[Found], Shown]) -> Study[Cell, Finding]:
    def cells(scale: Scale) -> list[Cell]:
        runs = [cell for share in SHARES for cell in trainings(designs, scale, share=share)]
        return [*dict.fromkeys(runs), *timings(designs, scale, links)]

    return Study(cells=cells, show=show)
