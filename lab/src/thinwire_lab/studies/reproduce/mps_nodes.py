"""Wu 2018: the speed of machines that are each worker and server (§4.3), relative to a single machine.

The modelled clock gives every machine a processor as fast as this one, and a link with the thesis's ratio of gradients
to rate: table 1.1 has 0.75 of a link with ResNet and 2.0 with Inception-v4, so that one network represents several. A
run times the single machine just before and after itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from thinwire.quantities import counted
from thinwire.transports.links import parse_rate
from thinwire_lab.engines.starters import forks
from thinwire_lab.jobs import in_process, processes
from thinwire_lab.jobs.cluster import Links, Place, choose_links
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.studies.reproduce.entry import Finding, Found, Scale
from thinwire_lab.studies.reproduce.job_cells import MESSAGES, JobCell, Pair, following, stand_in
from thinwire_lab.workloads.training import training

NODES: dict[Scale, int] = {"tiny": 2, "quick": 4, "full": 4}  # machines; the thesis has four
RESNET, DENSENET, INCEPTION = 0.7465, 0.2072, 2.0062
"""Gigabits of gradients that a machine generates in a second (table 1.1): shares of a link of 1 Gbit/s."""
TENSORFLOW = "fp32[placement=round-robin]"
TRADITIONAL = "fp32[transmission=traditional]"
SYNC = "fp32"
SYNC_TOP = "mps[consistency=bsp]"
STALE = "fp32[consistency=ssp[staleness=5,mode=passive]]"
STALE_TOP = "mps"
TRADITIONAL_TOP = "mps[consistency=bsp,transmission=traditional]"
TRADITIONAL_STALE = "fp32[consistency=ssp[staleness=5,mode=passive],transmission=traditional]"
TRADITIONAL_STALE_TOP = "mps[transmission=traditional]"
LABELS = {
    TENSORFLOW: "sync, round-robin",
    TRADITIONAL: "traditional",
    SYNC: "sync",
    SYNC_TOP: "sync, top 1 %",
    STALE: "stale 5",
    STALE_TOP: "stale 5, top 1 %",
    TRADITIONAL_TOP: "traditional, top 1 %",
    TRADITIONAL_STALE: "traditional, stale 5",
    TRADITIONAL_STALE_TOP: "traditional, stale 5, top 1 %",
}
"""Designs as the thesis names them; all but `traditional` are wait-free, and all but the first placed by algorithm 2.
The first stands for the thesis's TensorFlow: variables placed in turn, synchronous, gradients sent as they come."""
SCALED = (
    "The thesis: ResNet-110, GoogLeNet and Inception-v4 on four machines with a GPU each. Here a smaller network and a "
    "processor for each GPU; links are as thin as there beside the gradients that a machine generates."
)
MODELLED = (
    "Seconds of several machines are modelled: real bytes and codecs, processor seconds as measured here, a processor "
    "for each machine, and computed links. The single machine's are measured, of a plain loop without thinwire, just "
    f"before and after each run. {MESSAGES}"
)
FIRST = 7  # steps of a short run, which measures the seconds and bytes of the beginning and the end
STEPS: dict[Scale, int] = {"tiny": 13, "quick": 19, "full": 67}
"""A multiple of 6 more than `FIRST`: a worker of staleness 5 exchanges every 6 steps."""


class MachineCell(JobCell, frozen=True, kw_only=True):
    """Base class of the machines' trainings: the thesis's canonical SGD with a learning rate of 0.1."""

    design: str
    steps: int
    batch: int = 16
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"

    def job(self, **more: Any) -> Job:
        return super().job(servers_on_workers=True, **more)


class NodesFinding(Finding, frozen=True, kw_only=True):
    """Seconds of a step of several machines, and of one."""

    seconds_per_step: float  # by the modelled clock, or measured
    single_s: float  # of a step of a single machine, measured
    link: str  # rate of every machine's link
    shaping: str  # `modelled`; of a measured run `kernel`, or `none`
    sent_bytes: float  # of a machine's packets in a step, as worker and as server, to itself included


class NodesCell(MachineCell, frozen=True, kw_only=True):
    """A short run on links with a given share of generated gradients.

    A `measured` run has real processes, a worker and a server for each machine; the others are modelled.
    """

    finding = NodesFinding

    generated: float
    measured: bool = False

    def run(self, tell: Tell) -> NodesFinding:
        single = single_steps(self.job())
        once: Callable[..., RunOutcome] = in_process.run
        if self.measured:
            link, links = machine_links(self, self.generated, statistics.median(single))
            once = partial(processes.run, place=Place(links=links, starter=forks()))
        else:
            link = thin_link(self, self.generated, statistics.median(single))
            once(self.job(link=link, steps=2))  # kernels are loaded, memory is there
        short, long = once(self.job(link=link, steps=FIRST)), once(self.job(link=link), on_event=following(tell))
        seconds_per_step, sent_bytes = steady(short, long)
        return NodesFinding(
            seconds_per_step=seconds_per_step,
            single_s=statistics.median([*single, *single_steps(self.job())]),
            link=link,
            shaping=long.shaping,
            sent_bytes=sent_bytes / self.workers,
        )

    def impossible(self, finding: Any) -> str | None:
        if finding.seconds_per_step <= 0:
            return f"a step of {finding.seconds_per_step:.3g} s, for the shorter of two runs took longer"
        found = speedup(self, finding)
        return f"a speed-up of {found:.2f} with {counted(self.workers, 'machine')}" if found > self.workers else None


def steady(less: RunOutcome, more: RunOutcome) -> tuple[float, float]:
    """Returns the seconds and the bytes of a step, from the difference of two runs.

    On a loaded machine the short run may take longer; `impossible` refuses the negative seconds.
    """
    first_s, whole_s = (each.seconds_per_step * (each.steps - 1) for each in (less, more))
    first_nbytes, whole_nbytes = (each.wire_bytes_push + each.wire_bytes_pull for each in (less, more))
    steps = more.steps - less.steps
    return (whole_s - first_s) / steps, (whole_nbytes - first_nbytes) / steps


def speedup(cell: MachineCell, finding: Any) -> float:
    """Returns iterations a second of all machines together, over those of a single machine (Wu 2018, chapter 5)."""
    return float(cell.workers * finding.single_s / finding.seconds_per_step)


def pair(scale: Scale, network: str = "resnet20") -> Pair:
    """Returns model and data: a network on Fashion-MNIST, or a small one on the digits if that is not installed."""
    return stand_in(scale, (network, "fashion-mnist[test=200]"), (network.replace("resnet20", "resnet8"), "digits"))


def nodes(
    designs: Sequence[str], scale: Scale, generated: float, *, network: str = "resnet20", **own: Any
) -> list[NodesCell]:
    """Returns the runs of some designs, by default modelled and on the scale's number of machines."""
    chosen, examples = pair(scale, network)
    shared: dict[str, Any] = {"model": chosen, "data": examples, "workers": NODES[scale], "steps": STEPS[scale]}
    return [NodesCell(design=each, generated=generated, **shared | own) for each in designs]


def setting(found: Found) -> str:
    first, _ = found.first
    machines = ", ".join(str(each) for each in sorted(found.each("workers")))
    links = []
    for share in sorted(found.each("generated")):
        rates = [parse_rate(finding.link).bps or 0 for finding in found.where(generated=share).values()]
        links.append(f"{min(rates) / 1e6:.0f} … {max(rates) / 1e6:.0f} Mbit/s, of which a machine generates {share:g}")
    return (
        f"{' and '.join(found.each('model'))} on {first.data.partition('[')[0]}, {machines} machines that are worker "
        f"and server, batches of {first.batch}, {first.steps - FIRST} timed steps, links of {'; '.join(links)}."
    )


def thin_link(cell: MachineCell, generated: float, single_s: float) -> str:
    """Returns the rate of the link of a machine with steps of `single_s` seconds."""
    return f"{generated_bps(cell.job(), single_s) / generated / 1e6:.1f}mbit"


def machine_links(cell: MachineCell, generated: float, single_s: float) -> tuple[str, Links]:
    """Returns the rate of such links and their kind; no links if the kernel cannot shape them.

    Application shaping would give the two processes of a machine a link each.
    """
    rate = thin_link(cell, generated, single_s)
    links = choose_links(rate)
    return ("none", choose_links(None)) if links.shaping == "application" else (rate, links)


def generated_bps(job: Job, single_s: float) -> float:
    """Returns the bits of gradients that a machine generates in a second: 32 a value and step."""
    net = training(job.recipe(), data=job.data, data_root=job.data_root).model
    return 32 * sum(each.numel() for each in net.parameters()) / single_s


def single_steps(job: Job, steps: int = 6) -> list[float]:
    """Trains alone, without thinwire, and returns the processor seconds of each step after the first two."""
    torch.set_num_threads(1)
    made = training(job.recipe(), data=job.data, seed=job.seed, data_root=job.data_root)
    seconds = []
    for _ in range(steps + 2):
        began_s = time.thread_time()
        made.optimizer.zero_grad()
        made.backward()
        made.optimizer.step()
        seconds.append(time.thread_time() - began_s)
    return seconds[2:]
