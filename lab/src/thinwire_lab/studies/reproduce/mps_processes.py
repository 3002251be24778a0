"""Wu 2018, figures 5.5 and 5.6: speed-up by the number of machines, and the utilisation of processors and links.

Measured runs have real processes behind links of the kernel, as many machines as two cores carry; a worker's processor
replaces the GPU. Modelled runs have every number of machines. The two never share a column.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from thinwire.engines.events import Event
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire.transports.links import parse_rate
from thinwire_lab.engines.starters import forks
from thinwire_lab.jobs import processes
from thinwire_lab.jobs.cluster import Place
from thinwire_lab.jobs.events import Done, Progress
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.studies.reproduce import mps_nodes as on
from thinwire_lab.studies.reproduce.entry import Finding, Found, Scale, Shown, chart, scaled
from thinwire_lab.studies.reproduce.job_cells import following
from thinwire_lab.studies.reproduce.mps_nodes import MachineCell, NodesCell

_MACHINES: dict[Scale, tuple[int, ...]] = {"tiny": (1, 3), "quick": (1, 2, 4, 8, 16), "full": (1, 2, 4, 8, 16)}
_MEASURED: dict[Scale, tuple[int, ...]] = {"tiny": (1,), "quick": (1, 2), "full": (1, 2)}
_DESIGNS = (on.TENSORFLOW, on.STALE_TOP)
# Read from figure 5.5: TensorFlow, and the thesis's system.
_PRINTED = {1: (1.00, 1.00), 2: (1.43, 1.99), 4: (2.11, 3.76), 8: (2.95, 7.15)}


def _cells(scale: Scale) -> list[NodesCell]:
    nodes = partial(on.nodes, _DESIGNS, scale, on.RESNET)
    modelled = [each for count in _MACHINES[scale] for each in nodes(workers=count)]
    steps = on.FIRST + 3 * (on.STEPS[scale] - on.FIRST)
    measured = [each for count in _MEASURED[scale] for each in nodes(workers=count, steps=steps, measured=True)]
    return [*modelled, *measured]


def _show(found: Found) -> Shown:
    modelled, measured = found.where(measured=False), found.where(measured=True)
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
    about = "mps-figure-5.5", "Scalability. Our speed-ups are modelled."
    shapings = sorted({f"{finding.shaping}, {finding.link}" for finding in measured.values()})
    told = f" Measured: worker and server processes that share two cores, links: {'; '.join(shapings)}."
    return Shown(
        setting=on.setting(modelled) + (told if measured else ""),
        tables=[Table(header, lines, "Speed-up by the number of machines")],
        charts=[chart(*about, series, "machines", "speed-up over a single machine")],
        notes=["Two cores carry two measured machines: more would measure the cores.", on.MODELLED],
    )


MACHINES = 2  # as many as two cores carry
_STEPS: dict[Scale, int] = {"tiny": 200, "quick": 37, "full": 181}
"""A tiny step is a perceptron's, a few milliseconds: fewer steps would end before the second sample."""
# Of figure 5.6: GPU and network, in percent.
_BUSY = {
    on.TRADITIONAL: (21.78, 31.78),
    on.SYNC: (34.92, 54.59),
    on.SYNC_TOP: (43.02, 2.87),
    on.STALE: (57.67, 15.02),
    on.STALE_TOP: (70.03, 0.79),
}
SAMPLED = (
    "The thesis: four machines with a GPU each. Here two machines, whose workers and servers share two cores. Links "
    "are as thin as there beside the gradients that a machine generates."
)


class UtilisationFinding(Finding, frozen=True, kw_only=True):
    """Samples while all workers trained, shares of 0 … 1, an interval each."""

    seconds: list[float]  # of each interval's end, from the beginning
    processor: list[float]  # of a core, by worker's processes, the mean
    machine: list[float]  # of all cores, by everything that ran on this computer
    network: list[float]  # of the links' rate, sent and received, the mean; zeros without a link
    link: str  # rate of every machine's link
    shaping: str  # of the links


@dataclass(frozen=True, slots=True)
class Sample:
    """Sums at a time: seconds of all processors, busy and in total; by process its processor seconds and its
    interface's bytes, sent and received, headers included."""

    time_s: float
    machine_busy_s: float
    machine_s: float
    processor_s: Mapping[str, float]
    nbytes: Mapping[str, tuple[int, int]]


def sample(pids: Mapping[str, int]) -> Sample:
    """Returns a sample of running processes by name."""
    proc, tick_s, seconds, nbytes = Path("/proc"), 1 / os.sysconf("SC_CLK_TCK"), {}, {}
    for name, pid in pids.items():
        with suppress(OSError):
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            lines = (line.split() for line in (proc / str(pid) / "net/dev").read_text().replace(":", " ").splitlines())
            seconds[name] = (int(fields[11]) + int(fields[12])) * tick_s
            nbytes[name] = next(((int(each[9]), int(each[1])) for each in lines if each[0] == "eth0"), (0, 0))
    machine = [int(each) * tick_s for each in (proc / "stat").read_text().partition("\n")[0].split()[1:9]]
    return Sample(time.monotonic(), sum(machine) - machine[3] - machine[4], sum(machine), seconds, nbytes)


class UtilisationCell(MachineCell, frozen=True, kw_only=True):
    """A short run of processes, sampled when worker 0 reports progress: four times a second, or every step."""

    finding = UtilisationFinding

    generated: float

    def run(self, tell: Tell) -> UtilisationFinding:
        link, links = on.machine_links(self, self.generated, statistics.median(on.single_steps(self.job())))
        follow, pids, samples, ended = following(tell), dict[str, int](), list[Sample](), list[str]()

        def on_event(process: str, event: Event) -> None:
            follow(process, event)
            if isinstance(event, Done):
                ended.append(process)
            elif isinstance(event, Progress) and event.step > 1 and not ended:
                samples.append(sample(pids))

        place = Place(links=links, starter=forks())
        outcome = processes.run(self.job(link=link), place=place, on_event=on_event, on_start=pids.update)
        return utilisation(samples, link, outcome.shaping)


def _sampled_cells(scale: Scale) -> Sequence[UtilisationCell]:
    model, data = on.pair(scale)
    shared: dict[str, Any] = {"model": model, "data": data, "workers": MACHINES, "generated": on.RESNET}
    return [UtilisationCell(design=design, steps=_STEPS[scale], **shared) for design in _BUSY]


def utilisation(samples: Sequence[Sample], link: str, shaping: str) -> UtilisationFinding:
    """Returns the utilisation in each interval between samples."""
    bps = parse_rate(link).bps
    finding = UtilisationFinding(seconds=[], processor=[], machine=[], network=[], link=link, shaping=shaping)
    for before, after in pairwise(samples):
        seconds = after.time_s - before.time_s
        workers = [each for each in after.processor_s if each.startswith("worker") and each in before.processor_s]
        used = [after.processor_s[each] - before.processor_s[each] for each in workers]
        carried = [sum(after.nbytes[each]) - sum(before.nbytes[each]) for each in workers]
        finding.seconds.append(after.time_s - samples[0].time_s)
        finding.processor.append(statistics.fmean(used) / seconds if used else 0.0)
        finding.machine.append((after.machine_busy_s - before.machine_busy_s) / (after.machine_s - before.machine_s))
        both_ways = 0.0 if bps is None or not carried else 8 * statistics.fmean(carried) / (2 * bps * seconds)
        finding.network.append(both_ways)
    return finding


def _show_utilisation(found: Found) -> Shown:
    cells = {cell.design: finding for cell, finding in found.items()}
    lines, processor, network = [], list[Series](), list[Series]()
    for design, printed in _BUSY.items():
        finding = cells[design]
        means = [_percent(each) for each in (finding.processor, finding.network, finding.machine)]
        gpu, wire = (f"{each:.2f} %" for each in printed)
        lines.append([on.LABELS[design], gpu, means[0], wire, means[1], means[2]])
        for panel, values in ((processor, finding.processor), (network, finding.network)):
            panel.append(Series(label=on.LABELS[design], x=finding.seconds, y=[100 * each for each in values]))
    header = ["", "GPU, thesis", "worker's core, ours", "network, thesis", "network, ours", "all of this computer"]
    panels = [
        Panel(title="worker's processor", x_label="time (s)", y_label="of a core (%)", series=processor),
        Panel(title="link", x_label="time (s)", y_label="of its rate (%)", series=network),
    ]
    first, _ = found.first
    links = sorted({f"{finding.link} by the {finding.shaping}" for finding in found.values()})
    return Shown(
        setting=(
            f"{first.model} on {first.data.partition('[')[0]}, {first.workers} machines, a worker's and a server's "
            f"process each, {first.steps} steps, links: {', '.join(links)}. Sampled from /proc while they trained."
        ),
        tables=[Table(header, lines, "Utilisation, means over the time of training")],
        charts=[Chart(name="mps-figure-5.6", caption="Utilisation while training, measured.", panels=panels)],
        notes=[
            "Our network utilisation is of the link's rate, the mean of both ways, headers included. Where the last "
            "column is near 100 %, a worker waits for a processor and not for the network."
        ],
    )


def _percent(values: Sequence[float]) -> str:
    return f"{100 * statistics.fmean(values):.2f} %" if values else "too short"


_SCALABILITY = "scalability, 1 to 16 machines, modelled, and measured as far as two cores go"
_BUSYNESS = "processor and network utilisation over time"
ENTRIES = (
    *scaled("mps", on.SCALED, ("figure-5.5", _SCALABILITY, 3, _cells, _show), links=True),
    *scaled("mps", SAMPLED, ("figure-5.6", _BUSYNESS, 2, _sampled_cells, _show_utilisation), links=True),
)
