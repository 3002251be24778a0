"""Seconds of an iteration against 1/bandwidth, DoubleSqueeze's figures 3 and 6: measured, and modelled beside it.

Measured: real processes behind links of the kernel, a few steps each. Modelled: the planner's parameter server with the
sizes of the codecs' frames and the rate of the link; its seconds of computing are the measured step without a limit,
divided among the cores of the machine that shows them, so that a rate is all it has to predict. The two never share a
column.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import fmean, linear_regression
from typing import Any

import torch

from thinwire.planner.parameter_server import Cluster, Layer, Link, step_s
from thinwire.policies.compression import select
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire.quantities import counted
from thinwire.transports.links import parse_rate
from thinwire.worker.transmit_buffer import CHUNK_NBYTES
from thinwire_lab.jobs import processes
from thinwire_lab.jobs.cluster import Place, choose_links
from thinwire_lab.jobs.forks import forks
from thinwire_lab.jobs.workload import workload
from thinwire_lab.studies.reproduce.entry import Entry, Finding, OnProgress, Scale, Shown, Study, scaled
from thinwire_lab.studies.reproduce.job_cells import JobCell, following
from thinwire_lab.studies.reproduce.plain_sgd import SGD, choices, method, pair

NO_LIMIT = "none"
_RATES = ("80mbit", "40mbit", "26.667mbit", "20mbit", "16mbit", "13.333mbit", "11.429mbit", "10mbit")
"""Eight, at equal distances of 1/bandwidth."""
_LINKS: dict[Scale, Sequence[str]] = {
    "tiny": (NO_LIMIT, "100mbit"),
    "quick": (NO_LIMIT, "8mbit", "4mbit"),
    "full": (NO_LIMIT, *_RATES),
}
_WORKERS: dict[Scale, int] = {"tiny": 2, "quick": 4, "full": 8}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 1, "full": 3}
_STEPS = 12
_SEGMENT = 1514 / 1448
"""Bytes that the link counts for bytes of a TCP segment, with Ethernet's, IP's and TCP's headers."""

SCALED = (
    "The paper: ResNet-18 (44 MB), 8 workers with a GPU each, bandwidths of the server. Here all processes share two "
    "cores, models have 70 to 250 kB, and rates are lower by as much; every link has the rate, but the server's "
    "carries the traffic of all workers, so that it alone is slow. Computing weighs more than with a GPU each."
)


class TimedFinding(Finding, frozen=True, kw_only=True):
    """What a short run came to.

    Attributes:
        seconds_per_step: without the first step.
        wire_bytes: of packets, a step, at the server's link, both ways together, the first weights included.
        shaping: who made the link: `kernel`, `application`, or `none`.
    """

    seconds_per_step: float
    wire_bytes: float
    shaping: str


class TimedCell(JobCell, frozen=True, kw_only=True):
    """A short run of real processes behind links of one rate."""

    finding = TimedFinding

    design: str
    codec_up: str | None
    model: str
    data: str
    workers: int
    link: str
    steps: int = _STEPS
    seed: int = 0

    @classmethod
    def of(cls, method: str, **others: Any) -> TimedCell:
        """Returns the run of a method; `others` are fields of the cell."""
        design, codec_up = choices(method)
        return cls(design=design, codec_up=codec_up, **others)

    @property
    def method(self) -> str:
        """As in the paper's legends."""
        return method(self.design, self.codec_up)

    def __str__(self) -> str:
        return f"{self.method}, {self.model}, {self.workers} workers, link {self.link}, seed {self.seed}"

    def run(self, on_progress: OnProgress) -> TimedFinding:
        """Makes the run."""
        place = Place(links=choose_links(self.link), starter=forks())
        outcome = processes.run(self.job(), place=place, on_event=following(on_progress))
        return TimedFinding(
            seconds_per_step=outcome.seconds_per_step,
            wire_bytes=(outcome.wire_bytes_push + outcome.wire_bytes_pull) / outcome.steps,
            shaping=outcome.shaping,
        )


Found = Mapping[TimedCell, TimedFinding]


def cells(methods: Sequence[str], scale: Scale) -> list[TimedCell]:
    """Returns the runs of some methods: every rate, seed by seed."""
    network, examples = pair(scale)
    return [
        TimedCell.of(each, model=network, data=examples, workers=_WORKERS[scale], link=link, seed=seed)
        for seed in range(_SEEDS[scale])
        for link in _LINKS[scale]
        for each in methods
    ]


def modelled_s(cell: TimedCell, computing_s: float) -> float:
    """Returns the seconds of a step by the planner's model.

    Args:
        cell: design, model, workers and link.
        computing_s: of a step without a limit: computing of all workers and the server, on the cores that they share.
    """
    rate = parse_rate(cell.link).bps
    link = Link() if rate is None else Link(bytes_per_s=rate / 8 / _SEGMENT)
    cores = min(os.cpu_count() or 1, cell.workers)
    cluster = Cluster(
        workers=cell.workers,
        worker_link=link,
        server_link=link,
        cores=cores,
        use=1.0,  # what lockstep leaves idle is in the seconds of computing already
        chunk_nbytes=CHUNK_NBYTES,
    )
    return step_s(_layers(cell, computing_s * cores / cell.workers), cluster)


def _first_nbytes(cell: TimedCell) -> float:
    """What of a step's bytes the first weights are, which go from one worker through the server to all others."""
    return 4.0 * sum(each.numel() for each in workload(cell.job()).model.parameters()) * cell.workers / cell.steps


def _layers(cell: TimedCell, computing_s: float) -> list[Layer]:
    """A layer for each tensor; its frames have the size of those of random values, seconds are one worker's."""
    net = workload(cell.job()).model
    shapes = {name: tuple(each.shape) for name, each in net.named_parameters()}
    chosen = select(shapes, cell.job().full_design().compress())
    total = sum(each.numel() for each in net.parameters())
    generator = torch.Generator().manual_seed(0)
    layers = []
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        seconds = computing_s * values.numel() / total
        layers.append(
            Layer(
                name=name,
                forward_s=seconds / 3,
                backward_s=seconds * 2 / 3,
                push_nbytes=len(chosen[name].up.encode(values)),
                pull_nbytes=len(chosen[name].down.encode(values)),
            )
        )
    return layers


def show(item: str, methods: Sequence[str], found: Found) -> Shown:
    """Returns seconds by 1/bandwidth, how steep they are, and the model's."""
    links = list(dict.fromkeys(cell.link for cell in found))
    at = [_inverse(link) for link in links]
    measured = {name: [_mean(found, name, link) for link in links] for name in methods}
    modelled = {name: [_model(found, name, link, measured[name][0]) for link in links] for name in methods}
    tables = [
        _by_rate("Measured: seconds of an iteration", links, measured),
        _by_rate("Modelled: seconds of an iteration", links[1:], {name: each[1:] for name, each in modelled.items()}),
        _slopes(found, at, measured, modelled),
    ]
    panels = [
        Panel(
            title=title,
            x_label="1 / bandwidth (s per Mbit)",
            y_label="seconds of an iteration",
            series=[Series(label=name, x=at, y=seconds[name]) for name in methods],
        )
        for title, seconds in (("measured", measured), ("modelled", modelled))
    ]
    first, _ = next(iter(found.items()))
    seeds = counted(len({cell.seed for cell in found}), "run")
    shaping = " and ".join(sorted({each.shaping for each in found.values()} - {"none"}))
    return Shown(
        setting=(
            f"{first.model} on {first.data}, {first.workers} workers and a server as processes on one machine, "
            f"{first.steps} steps, links shaped by the {shaping}, {seeds} of each."
        ),
        tables=tables,
        charts=[Chart(name=f"doublesqueeze-{item}", caption="Seconds of an iteration.", panels=panels)],
        notes=[
            "The paper draws its curves and prints no numbers; it says that DoubleSqueeze is much faster than all "
            "others when bandwidth is limited, and that what compresses one way saves at most half. The steepness is "
            "that of the line through the points, and SGD's is 100 %."
        ],
    )


def _inverse(link: str) -> float:
    """Seconds for a megabit."""
    bps = parse_rate(link).bps
    return 0.0 if bps is None else 1e6 / bps


def _seconds(found: Found, name: str, link: str) -> list[float]:
    return [each.seconds_per_step for cell, each in found.items() if (cell.method, cell.link) == (name, link)]


def _mean(found: Found, name: str, link: str) -> float:
    return fmean(_seconds(found, name, link))


def _model(found: Found, name: str, link: str, computing_s: float) -> float:
    cell = next(cell for cell in found if (cell.method, cell.link) == (name, link))
    return modelled_s(cell, computing_s)


def _by_rate(title: str, links: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> Table:
    lines = [
        [link if link == NO_LIMIT else f"{parse_rate(link)}", *(f"{each[row]:.3f}" for each in seconds.values())]
        for row, link in enumerate(links)
    ]
    return Table(["link", *seconds], lines, title)


def _slopes(
    found: Found, at: Sequence[float], measured: Mapping[str, list[float]], modelled: Mapping[str, list[float]]
) -> Table:
    def steepness(seconds: Mapping[str, list[float]], name: str) -> float:
        return linear_regression(at, seconds[name]).slope / linear_regression(at, seconds[SGD]).slope

    first = _first_nbytes(next(iter(found)))
    lines = []
    for name in measured:
        paper = "100 %" if name == SGD else "nearly flat" if name.startswith("DoubleSqueeze") else "half or more"
        wire = fmean(each.wire_bytes for cell, each in found.items() if cell.method == name) - first
        apart = [ours / theirs - 1 for ours, theirs in zip(modelled[name][1:], measured[name][1:], strict=True)]
        lines.append(
            [
                *(name, paper, f"{steepness(measured, name):.1%}", f"{steepness(modelled, name):.1%}"),
                *(f"{wire / 1e3:,.1f}", f"{min(apart):+.0%} … {max(apart):+.0%}"),
            ]
        )
    header = ["", "steepness, paper", "measured", "modelled", "kB an iteration", "model's error"]
    return Table(header, lines, "Steepness against 1/bandwidth, of SGD's")


def timed_entry(number: int, methods: Sequence[str], what: str) -> Entry:
    """Returns the entry of a figure.

    Args:
        number: of the figure.
        methods: that it compares.
        what: it shows.
    """
    item = f"figure-{number}"
    study = Study[TimedCell, TimedFinding](
        cells=lambda scale: cells(methods, scale), show=lambda found: show(item, methods, found), links=True
    )
    return scaled("doublesqueeze", SCALED)(item, what, 2, study)
