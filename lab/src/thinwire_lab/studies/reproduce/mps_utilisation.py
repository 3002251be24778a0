"""Wu 2018, figure 5.6: how busy processors and links are by consistency, compression and transmission.

Measured: processes behind links of the kernel, sampled while they train. A machine is a worker and a server, as in the
thesis; the worker's processor stands for the GPU.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from thinwire.engines.events import Event
from thinwire.planner.utilisation import Sample, sample
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire.transports.links import parse_rate
from thinwire_lab.jobs import processes
from thinwire_lab.jobs.cluster import Place
from thinwire_lab.jobs.events import Done, Progress
from thinwire_lab.jobs.forks import forks
from thinwire_lab.studies.reproduce import mps_nodes as on
from thinwire_lab.studies.reproduce.entry import Finding, Found, OnProgress, Scale, Shown, scaled
from thinwire_lab.studies.reproduce.job_cells import following
from thinwire_lab.studies.reproduce.mps_nodes import MachineCell

MACHINES = 2  # as many as two cores carry
_STEPS: dict[Scale, int] = {"tiny": 200, "quick": 37, "full": 181}
"""Tiny ones are of a perceptron, a few milliseconds each: fewer would end before there are two samples."""
# Of figure 5.6: GPU and network, in percent.
_PRINTED = {
    on.TRADITIONAL: (21.78, 31.78),
    on.SYNC: (34.92, 54.59),
    on.SYNC_TOP: (43.02, 2.87),
    on.STALE: (57.67, 15.02),
    on.STALE_TOP: (70.03, 0.79),
}
SCALED = (
    "The thesis: four machines with a GPU each. Here two machines, whose workers and servers share two cores. Links "
    "are as thin as there beside the gradients that a machine generates."
)


class UtilisationFinding(Finding, frozen=True, kw_only=True):
    """What was sampled while all workers trained, shares of 0 … 1, an interval each."""

    seconds: list[float]  # of each interval's end, from the beginning
    processor: list[float]  # of a core, by worker's processes, the mean
    machine: list[float]  # of all cores, by everything that ran on this computer
    network: list[float]  # of the links' rate, sent and received, the mean; zeros without a link
    link: str  # rate of every machine's link
    shaping: str  # who made it


class Sampler:
    """Takes samples from a thread of its own until it is left."""

    def __init__(self, pids: Mapping[str, int], *, interval_s: float = 0.25) -> None:
        self.samples: list[Sample] = []  # so far
        self._pids, self._interval_s = dict(pids), interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="utilisation", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self.samples.append(sample(self._pids))
            self._over.wait(self._interval_s)


class UtilisationCell(MachineCell, frozen=True, kw_only=True):
    """A short run of processes, sampled."""

    finding = UtilisationFinding

    generated: float

    def run(self, on_progress: OnProgress) -> UtilisationFinding:
        link, links = on.machine_links(self, self.generated, statistics.median(on.single_steps(self.job())))
        with ExitStack() as sampling:
            pids: dict[str, int] = {}
            samplers: list[Sampler] = []
            follow = following(on_progress)

            def on_event(process: str, event: Event) -> None:
                follow(process, event)
                if isinstance(event, Progress) and not samplers and event.step > 1:
                    samplers.append(sampling.enter_context(Sampler(pids)))
                elif isinstance(event, Done):
                    sampling.close()

            place = Place(links=links, starter=forks())
            outcome = processes.run(self.job(link=link), place=place, on_event=on_event, on_start=pids.update)
        return utilisation(samplers[0].samples if samplers else [], link, outcome.shaping)


def _cells(scale: Scale) -> Sequence[UtilisationCell]:
    model, data = on.pair(scale)
    shared: dict[str, Any] = {"model": model, "data": data, "workers": MACHINES, "generated": on.RESNET}
    return [UtilisationCell(design=design, steps=_STEPS[scale], **shared) for design in _PRINTED]


def utilisation(samples: Sequence[Sample], link: str, shaping: str) -> UtilisationFinding:
    """Returns shares of each interval between samples."""
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


def _show(found: Found) -> Shown:
    cells = {cell.design: finding for cell, finding in found.items()}
    lines, processor, network = [], list[Series](), list[Series]()
    for design, printed in _PRINTED.items():
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


_SHOWS = "processor and network utilisation over time"
ENTRIES = scaled("mps", SCALED, ("figure-5.6", _SHOWS, 2, _cells, _show), links=True)
