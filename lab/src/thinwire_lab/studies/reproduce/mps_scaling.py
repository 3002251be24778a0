"""Wu 2018, figure 5.5: speed-up over a single machine by the number of machines, measured and modelled.

Measured are real processes behind links of the kernel, as many machines as two cores carry; modelled is every number.
The two never share a column.
"""

from __future__ import annotations

import statistics

from thinwire.engines.roles import OnEvent
from thinwire.presentation.charts import Series
from thinwire.presentation.tables import Table
from thinwire_lab.jobs import processes
from thinwire_lab.jobs.cluster import Place
from thinwire_lab.jobs.forks import forks
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.studies.reproduce import mps_nodes as on
from thinwire_lab.studies.reproduce.entry import Cell, Finding, Found, OnProgress, Scale, Shown, chart, scaled
from thinwire_lab.studies.reproduce.job_cells import following
from thinwire_lab.studies.reproduce.mps_nodes import MachineCell, NodesCell

_MACHINES: dict[Scale, tuple[int, ...]] = {"tiny": (1, 3), "quick": (1, 2, 4, 8, 16), "full": (1, 2, 4, 8, 16)}
_MEASURED: dict[Scale, tuple[int, ...]] = {"tiny": (1,), "quick": (1, 2), "full": (1, 2)}
_DESIGNS = (on.TENSORFLOW, on.STALE_TOP)
# Read from figure 5.5: TensorFlow, and the thesis's system.
_PRINTED = {1: (1.00, 1.00), 2: (1.43, 1.99), 4: (2.11, 3.76), 8: (2.95, 7.15)}


class MeasuredFinding(Finding, frozen=True, kw_only=True):
    """What a run came to."""

    seconds_per_step: float  # measured
    single_s: float  # of a step of a single machine, measured
    link: str  # rate of every machine's link
    shaping: str  # who made it: `kernel`, or `none` where that may not shape


class MeasuredCell(MachineCell, frozen=True, kw_only=True):
    """A short run of processes, a worker and a server for each machine, behind links as thin as `generated` says."""

    finding = MeasuredFinding

    generated: float

    def run(self, on_progress: OnProgress) -> MeasuredFinding:
        single = on.single_steps(self.job())
        link, links = on.machine_links(self, self.generated, statistics.median(single))
        place = Place(links=links, starter=forks())
        runs: list[RunOutcome] = []

        def run(steps: int, on_event: OnEvent) -> RunOutcome:
            runs.append(processes.run(self.job(link=link, steps=steps), place=place, on_event=on_event))
            return runs[-1]

        seconds_per_step, _ = on.steady(
            lambda: run(on.FIRST, lambda process, event: None), lambda: run(self.steps, following(on_progress))
        )
        return MeasuredFinding(
            seconds_per_step=seconds_per_step,
            single_s=statistics.median([*single, *on.single_steps(self.job())]),
            link=link,
            shaping=runs[-1].shaping,
        )


def _cells(scale: Scale) -> list[Cell]:
    model, data = on.pair(scale)
    modelled = [each for count in _MACHINES[scale] for each in on.nodes(_DESIGNS, scale, on.RESNET, workers=count)]
    steps = on.FIRST + 3 * (on.STEPS[scale] - on.FIRST)
    measured = [
        MeasuredCell(design=design, model=model, data=data, workers=count, generated=on.RESNET, steps=steps)
        for count in _MEASURED[scale]
        for design in _DESIGNS
    ]
    return [*modelled, *measured]


def _show(found: Found) -> Shown:
    modelled, measured = found.of(NodesCell), found.of(MeasuredCell)
    ours = {(cell.workers, cell.design): on.speedup(cell, finding) for cell, finding in modelled.items()}
    real = {(cell.workers, cell.design): on.speedup(cell, finding) for cell, finding in measured.items()}
    machines = sorted(modelled.each("workers"))
    lines = [
        [
            str(count),
            *(f"{each:.2f}" for each in _PRINTED.get(count, ())),
            *(["–", "–"] if count not in _PRINTED else []),
            *(f"{ours[count, design]:.2f}" for design in _DESIGNS),
            *(f"{real[count, design]:.2f}" if (count, design) in real else "–" for design in _DESIGNS),
        ]
        for count in machines
    ]
    header = ["machines", "thesis, TensorFlow", "thesis"]
    header += [f"ours, {how}: {on.LABELS[each]}" for how in ("modelled", "measured") for each in _DESIGNS]
    printed = zip(("thesis, TensorFlow", "thesis"), zip(*_PRINTED.values(), strict=True), strict=True)
    series = [Series(label=label, x=list(_PRINTED), y=values, role="paper") for label, values in printed]
    for design in _DESIGNS:
        label = f"modelled, {on.LABELS[design]}"
        series.append(Series(label=label, x=machines, y=[ours[count, design] for count in machines]))
    series.append(Series(label="linear", x=machines, y=machines))
    about = "mps-figure-5.5", "Scalability. Of ours, only what is modelled."
    shapings = sorted({f"{finding.shaping}, {finding.link}" for finding in measured.values()})
    told = f" Measured: worker and server processes that share two cores, links: {'; '.join(shapings)}."
    return Shown(
        setting=on.setting(modelled) + (told if measured else ""),
        tables=[Table(header, lines, "Speed-up by the number of machines")],
        charts=[chart(*about, series, "machines", "speed-up over a single machine")],
        notes=["Two cores carry two measured machines: more would measure the cores.", on.MODELLED],
    )


_SHOWS = "scalability, 1 to 16 machines, modelled, and measured as far as two cores go"
ENTRIES = scaled("mps", on.SCALED, ("figure-5.5", _SHOWS, 3, _cells, _show), links=True)
