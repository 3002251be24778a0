"""The computed clock beside the real one: seconds a step of runs in one process, and of processes behind real links.

Each cell is trained twice. Once as `thinwire train` does it, with a process for every worker and server and the kernel
shaping their links; once in one process, its clock computed from measured processor seconds, bytes and the links' rate,
with as many cores as this machine has and with what a message costs here behind such a link, which is measured first.
So is what workers that share the cores take from each other, with the workload's own steps and without any exchange.
The machine should do nothing else: what takes processors from the processes makes the measured step longer, and a
computed one does not know of it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.planner.transport_costs import Sharing, TransportCosts
from thinwire.presentation.tables import Table
from thinwire.transports.links import parse_rate
from thinwire_lab.bench.harness import Bench, Figures, Tell, column, median
from thinwire_lab.bench.options import ClockOptions
from thinwire_lab.bench.peer_costs import measure_sharing
from thinwire_lab.bench.transport_costs import measure_costs
from thinwire_lab.engines.queues import first_thin
from thinwire_lab.jobs import modelled
from thinwire_lab.jobs.cluster import Place, choose_links
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.processes import run

BAR = 0.1
"""Of the measured seconds: what the computed ones may differ by."""


class Clocked(Figures, frozen=True, kw_only=True):
    """Seconds a step by processes and by the computed clock, and what that was given."""

    measured_s: float
    modelled_s: float
    shaping: str
    cores: int
    costs: TransportCosts
    sharing: Sharing = Sharing()


@dataclass(kw_only=True)
class ClockBench(ClockOptions, Bench[Job, Clocked]):
    """A grid of workers, links and designs."""

    kinds = (Clocked,)
    serves = True
    key_options = ("shaping",)
    left = 3
    columns = (
        ("workers", lambda job, runs: str(job.workers)),
        ("link", lambda job, runs: str(job.link)),
        ("design", lambda job, runs: job.design),
        column("measured, s a step", "measured_s", "{:.4f}"),
        column("modelled, s a step", "modelled_s", "{:.4f}"),
        ("difference", lambda job, runs: f"{_difference(runs):+.1%}"),
    )

    def __post_init__(self) -> None:
        self._costs: dict[str | None, TransportCosts] = {}
        self._sharing: dict[int, Sharing] = {}
        self.cells()

    def costs(self, link: str | None) -> TransportCosts:
        """Returns what a message costs on this machine behind a link; measured once for each."""
        if link not in self._costs:
            self._costs[link] = measure_costs(choose_links(link, self.shaping))
        return self._costs[link]

    def sharing(self, workers: int) -> Sharing:
        """Returns what so many workers take from each other; measured once for each number."""
        if workers not in self._sharing:
            # The computed clock has its workers take turns in one process, and so has what they are compared with.
            self._sharing[workers] = measure_sharing(self.model, self.data, ranks=workers, copies=workers)
        return self._sharing[workers]

    def cells(self) -> list[Job]:
        return [
            Job(
                design=design,
                model=self.model,
                data=self.data,
                workers=workers,
                servers=self.servers,
                steps=self.steps,
                link=str(parse_rate(link)),
            )
            for link in self.links
            for workers in self.workers
            for design in self.designs
        ]

    def measure(self, cell: Job, before: Measured[Job, Clocked], tell: Tell) -> Clocked:
        cores = os.cpu_count() or 1
        tell("messages")
        costs = self.costs(cell.link)
        tell("workers side by side")
        sharing = self.sharing(cell.workers)
        tell("computed clock")
        # Twice: the first run loads, or compiles, what the second one times.
        modelled.run(cell, cores=cores, costs=costs, sharing=sharing)
        computed = modelled.run(cell, cores=cores, costs=costs, sharing=sharing)
        tell("processes")
        outcome = run(cell, place=Place(links=choose_links(cell.link, self.shaping)))
        return Clocked(
            measured_s=outcome.seconds_per_step,
            modelled_s=computed.seconds_per_step,
            shaping=outcome.shaping,
            cores=cores,
            costs=costs,
            sharing=sharing,
        )

    def thin_link(self) -> tuple[str | None, str]:
        return first_thin(self.links), self.shaping

    def line(self, cell: Job, figures: Clocked) -> str:
        return (
            f"{cell.workers} workers, {cell.link}, {cell.design}: {figures.measured_s:.4f} s measured "
            f"({figures.shaping}), {figures.modelled_s:.4f} s modelled"
        )

    def tables(self, measured: Measured[Job, Clocked]) -> list[Table]:
        [table] = super().tables(measured)
        return [Table(table.header, table.lines, f"{self.model} on {self.data}, {self.steps} steps", left=self.left)]

    def notes(self, measured: Measured[Job, Clocked]) -> list[str]:
        differences = [abs(_difference(runs)) for runs in measured.values()]
        within = sum(each <= BAR for each in differences)
        by_workers = {cell.workers: runs[0].sharing for cell, runs in measured.items()}
        by_link = {cell.link: runs[0].costs for cell, runs in measured.items()}
        return [
            *(
                f"link {link}: a message takes {1e6 * costs.worker_message_s:.0f} µs of a processor at a worker and "
                f"{1e6 * costs.server_message_s:.0f} at a server, a megabyte {1e12 * costs.byte_s:.0f} µs, and it "
                f"comes {1e6 * costs.latency_s:.0f} µs after its last byte"
                for link, costs in by_link.items()
            ),
            *(
                f"{workers} workers: beside the others a step takes {sharing.slowdown:.2f} times the processor seconds "
                f"of one in turn with them, and lockstep leaves {sharing.use:.0%} of the processors in use"
                for workers, sharing in by_workers.items()
            ),
            f"{within} of {len(differences)} points within {BAR:.0%}; median {statistics.median(differences):.1%}, "
            f"largest {max(differences):.1%}",
        ]


def _difference(runs: Sequence[Clocked]) -> float:
    """Returns by how much the computed seconds exceed the measured ones, as a share of those."""
    return median(runs, "modelled_s") / median(runs, "measured_s") - 1
