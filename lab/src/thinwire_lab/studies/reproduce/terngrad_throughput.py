"""TernGrad's figure 5: throughput of three networks on up to 512 GPUs, by the paper's performance model (eq. 29, 30).

All figures are computed. The paper gives neither the profiled seconds of one GPU nor the size of ternary gradients:
single-GPU speeds are published ones of the same cards, rates of links are nominal, and the table shows two sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.studies.architectures import architecture
from thinwire_lab.studies.reproduce.entry import Cell, Finding, Found, Scale, Shown, scaled

GPUS = tuple(2**power for power in range(10))
GPUS_PER_MACHINE = 4
FLOAT32, LITERAL, ALGORITHM = "float32", "TernGrad, 2 bits on every hop", "TernGrad, its own algorithm"
_BATCH = {"alexnet": 128, "googlenet": 64, "vggnet-a": 32}
# VGG-A's multiplications and additions over VGG-16's: 7.61 and 15.47 billion an image.
_A_OVER_16 = 15.47 / 7.61


class Cluster(NamedTuple):
    """One of the two clusters; rates in bytes and images a second."""

    title: str
    gpu_bytes_per_s: float
    cpu_bytes_per_s: float
    network_bytes_per_s: float
    network_latency_s: float
    images_per_s: Mapping[str, float]


# GTX 1080: J. Johnson's cnn-benchmarks (commit 83d441f, 2017), Torch, cuDNN 5.0 and 5.1, batches of 16 images in 20.74,
# 56.16 and 182.79 ms (the last VGG-16). P100: AlexNet and VGG-16 of TensorFlow's benchmarks (May 2017, DGX-1, synthetic
# data, 2,987 and 144 images/s); GoogLeNet of a Dell white paper (NV-Caffe, 468 images/s).
_1080 = {"alexnet": 16 / 20.74e-3, "googlenet": 16 / 56.16e-3, "vggnet-a": 16 / 182.79e-3 * _A_OVER_16}
_P100 = {"alexnet": 2987.0, "googlenet": 468.0, "vggnet-a": 144.0 * _A_OVER_16}
CLUSTERS = {
    "ethernet": Cluster("(a) GTX 1080, PCIe, 1 Gbit/s Ethernet", 10e9, 10e9, 125e6, 50e-6, _1080),
    "infiniband": Cluster("(b) P100, NVLink, 100 Gbit/s InfiniBand", 40e9, 10e9, 12.5e9, 2e-6, _P100),
}
# Speed-ups that the paper states in words (§5): cluster, network, GPUs, speed-up.
_CLAIMS = (("ethernet", "alexnet", 8, 3.04), ("infiniband", "vggnet-a", 512, 2.0))


class ThroughputFinding(Finding, frozen=True, kw_only=True):
    """Images a second for each number of GPUs in `GPUS`, by kind of gradients."""

    images_per_s: dict[str, list[float]]


class ThroughputCell(Cell, frozen=True, kw_only=True):
    """One network on one cluster."""

    finding = ThroughputFinding

    network: str
    cluster: str

    def run(self, tell: Tell) -> ThroughputFinding:
        def images_per_s(what: str, gpus: int) -> float:
            return gpus * _BATCH[self.network] / step_s(self.network, CLUSTERS[self.cluster], what, gpus)

        kinds = (FLOAT32, LITERAL, ALGORITHM)
        return ThroughputFinding(images_per_s={what: [images_per_s(what, gpus) for gpus in GPUS] for what in kinds})


def sent(network: str, what: str, gpus: int) -> tuple[float, float]:
    """Returns the bytes of an exchange within a machine, and between two.

    By the algorithm (§3.1 and §4.2) every GPU is a worker. Gradients travel as float32 within a machine; between
    machines two bits travel up and ⌈log₂(2N + 1)⌉ down, and the last layer stays float32. The model takes the mean of
    both as the size of an exchange.
    """
    sizes = [each.numel for each in architecture(network)]
    whole, last = sum(sizes), sum(sizes[-2:])
    if what == FLOAT32:
        return 4.0 * whole, 4.0 * whole
    if what == LITERAL:
        return whole / 4, whole / 4
    bits = (2 + math.ceil(math.log2(2 * gpus + 1))) / 2
    return 4.0 * whole, (whole - last) * bits / 8 + 4 * last


def step_s(network: str, at: Cluster, what: str, gpus: int) -> float:
    """Returns the seconds of a step in which every GPU has a batch (eq. 29): computing, and

    |g|/C_gwd·log₂ i + |g|/C_cwd + (C_ncost + |g|/C_nwd)·log₂ j.

    A profiled step of one GPU contains its copy to the CPU:

    >>> round(step_s("alexnet", CLUSTERS["ethernet"], FLOAT32, 1) * CLUSTERS["ethernet"].images_per_s["alexnet"])
    128
    """
    inside = min(GPUS_PER_MACHINE, gpus)
    within, between = sent(network, what, gpus)
    copied, _ = sent(network, FLOAT32, 1)
    computing_s = _BATCH[network] / at.images_per_s[network] - copied / at.cpu_bytes_per_s
    machine_s = within / at.gpu_bytes_per_s * math.log2(inside) + within / at.cpu_bytes_per_s
    network_s = (at.network_latency_s + between / at.network_bytes_per_s) * math.log2(gpus // inside)
    return computing_s + machine_s + network_s


def _cells(_: Scale) -> Sequence[ThroughputCell]:
    return [ThroughputCell(network=network, cluster=cluster) for cluster in CLUSTERS for network in _BATCH]


def _show(found: Found) -> Shown:
    panels = []
    for name, cluster in CLUSTERS.items():
        series = [
            Series(label=f"{cell.network}, {what}", x=GPUS, y=finding.images_per_s[what])
            for cell, finding in found.where(cluster=name).items()
            for what in (FLOAT32, ALGORITHM)
        ]
        panels.append(
            Panel(title=cluster.title, x_label="GPUs", y_label="images/s", series=series, x_log=True, y_log=True)
        )
    claims, sizes = [], []
    for name, network, gpus, printed in _CLAIMS:
        cell = ThroughputCell(network=network, cluster=name)
        rates, at = found[cell].images_per_s, GPUS.index(gpus)
        ours = [rates[what][at] / rates[FLOAT32][at] for what in (LITERAL, ALGORITHM)]
        texts = (f"{each:.2f}×" for each in (printed, *ours))
        claims.append([f"{network} on {gpus} GPUs, {CLUSTERS[name].title}", *texts, f"{ours[1] / printed - 1:+.0%}"])
    for cell, finding in found.items():
        fast, slow = finding.images_per_s[ALGORITHM], finding.images_per_s[FLOAT32]
        points = [GPUS.index(gpus) for gpus in (8, 64, 512)]
        speedups = [f"{fast[point] / slow[point]:.2f}×" for point in points]
        sizes.append(
            [f"{cell.network}, {CLUSTERS[cell.cluster].title}", *(f"{slow[at]:,.0f}" for at in points), *speedups]
        )
    more = ["", *(f"float32 at {gpus}" for gpus in (8, 64, 512)), *(f"speed-up at {gpus}" for gpus in (8, 64, 512))]
    return Shown(
        setting=(
            "Weak scaling with 128, 64 and 32 images a GPU, four GPUs a machine, equations 29 and 30. Everything is "
            "modelled: PCIe 10 GB/s, NVLink 40 GB/s, links at their nominal rate, single-GPU rates as published of "
            "Torch, TensorFlow and NV-Caffe."
        ),
        tables=[
            Table(["", "paper", LITERAL, ALGORITHM, "against the paper"], claims, "Speed-ups that the paper states"),
            Table(more, sizes, "Modelled images a second"),
        ],
        charts=[Chart(name="terngrad-figure-5", caption="Modelled training throughput.", panels=panels)],
        notes=[
            "The paper prints no numbers in its figure. With 2 bits on every hop both speed-ups come out too large. "
            "With the bytes of algorithm 1, VggNet-A on 512 GPUs comes within 10 %. AlexNet on 8 GPUs does not: the "
            "paper profiled it with batch norm and an input pipeline, and the published rate is of bare passes."
        ],
    )


SCALED = "The paper's equations and clusters; the seconds of a single GPU, which it does not print, are of others."
_SHOWS = "throughput to 512 GPUs by the performance model"
ENTRIES = scaled("terngrad", SCALED, ("figure-5", _SHOWS, 0.1, _cells, _show))
