"""Wu 2018, figure 5.5: speed-up over a single machine by the number of machines, measured and modelled.

Measured are real processes behind links of the kernel, as many machines as two cores carry; modelled is every number.
The two never share a column.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from thinwire.engines.roles import OnEvent
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.jobs import processes
from thinwire_lab.jobs.cluster import Place, choose_links
from thinwire_lab.jobs.forks import forks
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.studies.reproduce.entry import Cell, Finding, OnProgress, Scale, Shown, Study, scaled
from thinwire_lab.studies.reproduce.job_cells import following
from thinwire_lab.studies.reproduce.mps_nodes import (
    FIRST,
    LABELS,
    MODELLED,
    RESNET,
    SCALED,
    STALE_TOP,
    STEPS,
    TENSORFLOW,
    MachineCell,
    NodesCell,
    NodesFinding,
    nodes,
    pair,
    setting,
    single_steps,
    speedup,
    steady,
    thin_link,
)

_MACHINES: dict[Scale, tuple[int, ...]] = {"tiny": (1, 3), "quick": (1, 2, 4, 8, 16), "full": (1, 2, 4, 8, 16)}
_MEASURED: dict[Scale, tuple[int, ...]] = {"tiny": (1,), "quick": (1, 2), "full": (1, 2)}
_DESIGNS = (TENSORFLOW, STALE_TOP)
# Read from figure 5.5: TensorFlow, and the thesis's system.
_PRINTED = {1: (1.00, 1.00), 2: (1.43, 1.99), 4: (2.11, 3.76), 8: (2.95, 7.15)}


class MeasuredFinding(Finding, frozen=True, kw_only=True):
    """What a run came to.

    Attributes:
        seconds_per_step: measured.
        single_s: of a step of a single machine, measured.
        link: rate of every machine's link.
        shaping: who made it: `kernel`, or `none` where that may not shape.
    """

    seconds_per_step: float
    single_s: float
    link: str
    shaping: str


class MeasuredCell(MachineCell, frozen=True, kw_only=True):
    """A short run of processes, a worker and a server for each machine, behind links as thin as `generated` says."""

    finding = MeasuredFinding

    generated: float

    def __str__(self) -> str:
        return f"{self.design}, {self.model}, machines as processes: {self.workers}"

    def run(self, on_progress: OnProgress) -> MeasuredFinding:
        """Makes the run, and times a single machine before and after it."""
        single = single_steps(self.job())
        link = thin_link(self, self.generated, statistics.median(single))
        links = choose_links(link)
        if links.shaping == "application":  # which gives the two processes of a machine a link each
            link, links = "none", choose_links(None)
        place = Place(links=links, starter=forks())
        runs: list[RunOutcome] = []

        def run(steps: int, on_event: OnEvent) -> RunOutcome:
            runs.append(processes.run(self.job(link=link, steps=steps), place=place, on_event=on_event))
            return runs[-1]

        seconds_per_step, _ = steady(
            lambda: run(FIRST, lambda process, event: None), lambda: run(self.steps, following(on_progress))
        )
        return MeasuredFinding(
            seconds_per_step=seconds_per_step,
            single_s=statistics.median([*single, *single_steps(self.job())]),
            link=link,
            shaping=runs[-1].shaping,
        )


Found = Mapping[Cell, Finding]


def _cells(scale: Scale) -> list[Cell]:
    model, data = pair(scale)
    modelled = [each for count in _MACHINES[scale] for each in nodes(_DESIGNS, scale, RESNET, workers=count)]
    steps = FIRST + 3 * (STEPS[scale] - FIRST)
    measured = [
        MeasuredCell(design=design, model=model, data=data, workers=count, generated=RESNET, steps=steps)
        for count in _MEASURED[scale]
        for design in _DESIGNS
    ]
    return [*modelled, *measured]


def _show(found: Found) -> Shown:
    modelled = {c: f for c, f in found.items() if isinstance(c, NodesCell) and isinstance(f, NodesFinding)}
    measured = {c: f for c, f in found.items() if isinstance(c, MeasuredCell) and isinstance(f, MeasuredFinding)}
    ours = {(cell.workers, cell.design): speedup(cell, finding) for cell, finding in modelled.items()}
    real = {(c.workers, c.design): c.workers * f.single_s / f.seconds_per_step for c, f in measured.items()}
    machines = sorted({count for count, _ in ours})
    lines = [
        [
            str(count),
            *(f"{each:.2f}" for each in _PRINTED.get(count, ())[:2]),
            *(["–", "–"] if count not in _PRINTED else []),
            *(f"{ours[count, design]:.2f}" for design in _DESIGNS),
            *(f"{real[count, design]:.2f}" if (count, design) in real else "–" for design in _DESIGNS),
        ]
        for count in machines
    ]
    header = ["machines", "thesis, TensorFlow", "thesis", *(f"ours, modelled: {LABELS[each]}" for each in _DESIGNS)]
    header += [f"ours, measured: {LABELS[each]}" for each in _DESIGNS]
    printed = list(_PRINTED)
    series = [
        Series(label="thesis, TensorFlow", x=printed, y=[_PRINTED[each][0] for each in printed], role="paper"),
        Series(label="thesis", x=printed, y=[_PRINTED[each][1] for each in printed], role="paper"),
        *(
            Series(label=f"modelled, {LABELS[design]}", x=machines, y=[ours[count, design] for count in machines])
            for design in _DESIGNS
        ),
        Series(label="linear", x=machines, y=machines),
    ]
    panel = Panel(title="", x_label="machines", y_label="speed-up over a single machine", series=series)
    shapings = sorted({f"{finding.shaping}, {finding.link}" for finding in measured.values()})
    told = f" Measured: worker and server processes that share two cores, links: {'; '.join(shapings)}."
    return Shown(
        setting=setting(modelled) + (told if measured else ""),
        tables=[Table(header, lines, "Speed-up by the number of machines")],
        charts=[Chart(name="mps-figure-5.5", caption="Scalability. Of ours, only what is modelled.", panels=[panel])],
        notes=[
            "Measured machines are a worker's and a server's process each, and two cores carry two of them; more would "
            "measure the cores. The thesis has at most eight.",
            MODELLED,
        ],
    )


ENTRIES = (
    scaled("mps", SCALED)(
        "figure-5.5",
        "scalability, 1 to 16 machines, modelled, and measured as far as two cores go",
        3,
        Study(cells=_cells, show=_show, links=True),
    ),
)
