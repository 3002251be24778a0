"""Seconds of an iteration against 1/bandwidth, DoubleSqueeze's figures 3 and 6.

They are measured on real processes behind links of the kernel, a few steps each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, linear_regression
from typing import Any

from thinwire.presentation.charts import Series
from thinwire.presentation.tables import Table
from thinwire.quantities import counted
from thinwire.transports.links import parse_rate
from thinwire_lab.jobs import processes
from thinwire_lab.jobs.cluster import Place, choose_links
from thinwire_lab.jobs.forks import forks
from thinwire_lab.jobs.workload import workload
from thinwire_lab.studies.reproduce.entry import Entry, Finding, OnProgress, Scale, Shown, chart, scaled
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

SCALED = (
    "The paper: ResNet-18 (44 MB), 8 workers with a GPU each. Here all processes share two cores, models have 70 to "
    "250 kB, and rates are lower by as much. Computing weighs more than with a GPU each."
)


class TimedFinding(Finding, frozen=True, kw_only=True):
    """What a short run came to."""

    seconds_per_step: float  # without the first step
    wire_bytes: float  # of packets, a step, at the server's link, both ways together, the first weights included
    shaping: str  # who made the link: `kernel`, `application`, or `none`


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


def show(item: str, methods: Sequence[str], found: Found) -> Shown:
    """Returns seconds by 1/bandwidth, and how steep they are."""
    links = list(dict.fromkeys(cell.link for cell in found))
    at = [_inverse(link) for link in links]
    measured = {name: [_mean(found, name, link) for link in links] for name in methods}
    tables = [_by_rate("Measured: seconds of an iteration", links, measured), _slopes(found, at, measured)]
    series = [Series(label=name, x=at, y=measured[name]) for name in methods]
    axes = "1 / bandwidth (s per Mbit)", "seconds of an iteration"
    first = next(iter(found))
    seeds = counted(len({cell.seed for cell in found}), "run")
    shaping = " and ".join(sorted({each.shaping for each in found.values()} - {"none"}))
    return Shown(
        setting=(
            f"{first.model} on {first.data}, {first.workers} workers and a server as processes on one machine, "
            f"{first.steps} steps, links shaped by the {shaping}, {seeds} of each."
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
    """Seconds for a megabit."""
    bps = parse_rate(link).bps
    return 0.0 if bps is None else 1e6 / bps


def _mean(found: Found, name: str, link: str) -> float:
    return fmean(each.seconds_per_step for cell, each in found.items() if (cell.method, cell.link) == (name, link))


def _by_rate(title: str, links: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> Table:
    lines = [
        [link if link == NO_LIMIT else f"{parse_rate(link)}", *(f"{each[row]:.3f}" for each in seconds.values())]
        for row, link in enumerate(links)
    ]
    return Table(["link", *seconds], lines, title)


def _slopes(found: Found, at: Sequence[float], measured: Mapping[str, list[float]]) -> Table:
    slopes = {name: linear_regression(at, seconds).slope for name, seconds in measured.items()}
    cell = next(iter(found))
    # The first weights go from one worker through the server to all others.
    values = sum(each.numel() for each in workload(cell.job()).model.parameters())
    first = 4.0 * values * cell.workers / cell.steps
    lines = []
    for name, slope in slopes.items():
        paper = "100 %" if name == SGD else "nearly flat" if name.startswith("DoubleSqueeze") else "half or more"
        wire = fmean(each.wire_bytes for cell, each in found.items() if cell.method == name) - first
        lines.append([name, paper, f"{slope / slopes[SGD]:.1%}", f"{wire / 1e3:,.1f}"])
    header = ["", "steepness, paper", "measured", "kB an iteration"]
    return Table(header, lines, "Steepness against 1/bandwidth, of SGD's")


def timed_entry(number: int, methods: Sequence[str], what: str) -> Entry:
    """Returns the entry of a figure that compares methods."""
    item = f"figure-{number}"
    made = scaled("doublesqueeze", SCALED)
    return made(item, what, 2, partial(cells, methods), partial(show, item, methods), links=True)
