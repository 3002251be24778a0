"""The methods of DoubleSqueeze §5.1, and seconds of an iteration against 1/bandwidth, figures 3 and 6.

SGD is MEM-SGD with float32 pushes, so that only the codecs differ: MEM-SGD pulls float32 averages, and float32 pushes
leave no residual. Seconds are measured on real processes behind links of the kernel, a few steps each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from statistics import linear_regression
from typing import Any

from thinwire.presentation.charts import Series
from thinwire.presentation.tables import Table
from thinwire.transports.links import parse_rate
from thinwire_lab.engines.starters import forks
from thinwire_lab.jobs import processes
from thinwire_lab.jobs.cluster import Place, choose_links
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.jobs.job import Job
from thinwire_lab.studies.reproduce.entry import Found, Made, Scale, Shown, chart
from thinwire_lab.studies.reproduce.job_cells import (
    SMALL,
    JobCell,
    Pair,
    TimedFinding,
    TrainingCell,
    following,
    stand_in,
)

SGD = "SGD"
_DESIGNS = {
    "DoubleSqueeze 1-bit": "doublesqueeze-1bit",
    "MEM-SGD 1-bit": "mem-sgd-1bit",
    "QSGD": "qsgd-ds",
    "DoubleSqueeze top-k": "doublesqueeze-topk",
    "MEM-SGD top-k": "mem-sgd-topk",
    "Top-k SGD": "topk-sgd",
}
ONE_BIT = ("DoubleSqueeze 1-bit", "MEM-SGD 1-bit", "QSGD", SGD)
TOP_K = ("DoubleSqueeze top-k", "MEM-SGD top-k", "Top-k SGD", SGD)  # as figures 1 to 3 and 4 to 6 name them


def choices(method: str) -> tuple[str, str | None]:
    """Returns the `design` and the `codec_up` of a `jobs.job.Job` that make a method."""
    return ("mem-sgd-1bit", "fp32") if method == SGD else (_DESIGNS[method], None)


class PlainCell(TrainingCell, frozen=True, kw_only=True):
    """One training with a method."""

    method: str
    design: str = ""

    def job(self, **more: Any) -> Job:
        design, codec_up = choices(self.method)
        return super().job(design=design, codec_up=codec_up, **more)


def pair(scale: Scale) -> Pair:
    """Returns the model and the data of a scale, the same for losses and for seconds."""
    return stand_in(scale, ("lenet5", "fashion-mnist")) if scale == "full" else SMALL


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

SCALED = (
    "The paper: ResNet-18 (44 MB), 8 workers with a GPU each. Here all processes share two cores, models have 70 to "
    "250 kB, and rates are lower by as much. Computing weighs more than with a GPU each."
)


class TimedCell(JobCell, frozen=True, kw_only=True):
    """A short run of real processes behind links of one rate."""

    finding = TimedFinding

    method: str
    link: str
    steps: int = _STEPS

    def job(self, **more: Any) -> Job:
        design, codec_up = choices(self.method)
        return super().job(design=design, codec_up=codec_up, **more)

    def run(self, tell: Tell) -> TimedFinding:
        place = Place(links=choose_links(self.link), starter=forks())
        return TimedFinding.of(processes.run(self.job(), place=place, on_event=following(tell)))


def cells(methods: Sequence[str], scale: Scale) -> list[TimedCell]:
    """Returns the runs of some methods: every rate, seed by seed."""
    network, examples = pair(scale)
    return [
        TimedCell(method=each, model=network, data=examples, workers=_WORKERS[scale], link=link, seed=seed)
        for seed in range(_SEEDS[scale])
        for link in _LINKS[scale]
        for each in methods
    ]


def show(item: str, methods: Sequence[str], found: Found) -> Shown:
    links = found.each("link")
    at = [_inverse(link) for link in links]
    seconds = attrgetter("seconds_per_step")
    measured = {name: [found.where(method=name, link=link).mean(seconds) for link in links] for name in methods}
    rates = [link if link == NO_LIMIT else f"{parse_rate(link)}" for link in links]
    by_rate = [[rate, *(f"{each[row]:.3f}" for each in measured.values())] for row, rate in enumerate(rates)]
    tables = [Table(["link", *measured], by_rate, "Measured: seconds of an iteration"), _slopes(found, at, measured)]
    series = [Series(label=name, x=at, y=measured[name]) for name in methods]
    axes = "1 / bandwidth (s per Mbit)", "seconds of an iteration"
    first, _ = found.first
    shaping = " and ".join(sorted({each.shaping for each in found.values()} - {"none"}))
    return Shown(
        setting=(
            f"{first.model} on {first.data}, {first.workers} workers and a server as processes on one machine, "
            f"{first.steps} steps, links shaped by the {shaping}, {found.seeds} of each."
        ),
        tables=tables,
        charts=[chart(f"doublesqueeze-{item}", "Seconds of an iteration.", series, *axes)],
        notes=[
            "The paper prints no numbers. It says that DoubleSqueeze is much faster than all others at limited "
            "bandwidth, and that one-way compression saves at most half. The steepness is that of the line through the "
            "points."
        ],
    )


def _inverse(link: str) -> float:
    bps = parse_rate(link).bps
    return 0.0 if bps is None else 1e6 / bps


def _slopes(found: Found, at: Sequence[float], measured: Mapping[str, list[float]]) -> Table:
    slopes = {name: linear_regression(at, seconds).slope for name, seconds in measured.items()}
    cell, _ = found.first
    # The first weights go from one worker through the server to all others.
    values = sum(each.numel() for each in cell.job().workload().model.parameters())
    first = 4.0 * values * cell.workers / cell.steps
    lines = []
    for name, slope in slopes.items():
        paper = "100 %" if name == SGD else "nearly flat" if name.startswith("DoubleSqueeze") else "half or more"
        wire = found.where(method=name).mean(lambda each: each.wire_bytes) - first
        ours = f"{slope / slopes[SGD]:.1%}" if slope > 0 else "below 0: the machine was loaded"
        lines.append([name, paper, ours, f"{wire / 1e3:,.1f}"])
    header = ["", "steepness, paper", "measured", "kB an iteration"]
    return Table(header, lines, "Steepness against 1/bandwidth, of SGD's")


def timed(number: int, methods: Sequence[str], what: str) -> Made:
    item = f"figure-{number}"
    return item, what, 2, partial(cells, methods), partial(show, item, methods)
