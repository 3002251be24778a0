"""TernGrad's figure 5: throughput of three networks on up to 512 GPUs, by the paper's performance model.

Nothing is measured here. The paper gives its equations (appendix B) and two speed-ups, and keeps to itself the profiled
seconds of one GPU, the rates of its links and the size that it took for ternary gradients. Single-GPU rates are
therefore those that others published of the same cards, rates of links are nominal, and two sizes are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.all_reduce import Machines, Sent, communication_s, strong_step_s, weak_step_s
from thinwire_lab.studies.architectures import architecture
from thinwire_lab.studies.reproduce.entry import Cell, Finding, OnProgress, Scale, Shown, Study, scaled

GPUS = tuple(2**power for power in range(10))
GPUS_PER_MACHINE = 4
FLOAT32, LITERAL, ALGORITHM = "float32", "TernGrad, 2 bits on every hop", "TernGrad, its own algorithm"
_BATCH = {"alexnet": 128, "googlenet": 64, "vggnet-a": 32}
# VGG-A's multiplications and additions over VGG-16's: 7.61 and 15.47 billion an image.
_A_OVER_16 = 15.47 / 7.61


@dataclass(frozen=True, kw_only=True)
class _Cluster:
    """What one of the two clusters is made of; rates in bytes and images a second."""

    title: str
    gpu_bytes_per_s: float
    cpu_bytes_per_s: float
    network_bytes_per_s: float
    network_latency_s: float
    images_per_s: Mapping[str, float]


# GTX 1080: J. Johnson's cnn-benchmarks (commit 83d441f, 2017), Torch, cuDNN 5.0 and 5.1, batches of 16 images in 20.74,
# 56.16 and 182.79 ms (the last VGG-16). P100: AlexNet and VGG-16 of TensorFlow's benchmarks (May 2017, DGX-1, synthetic
# data, 2,987 and 144 images/s); GoogLeNet of a Dell white paper (NV-Caffe, 468 images/s).
_CLUSTERS = {
    "ethernet": _Cluster(
        title="(a) GTX 1080, PCIe, 1 Gbit/s Ethernet",
        gpu_bytes_per_s=10e9,
        cpu_bytes_per_s=10e9,
        network_bytes_per_s=125e6,
        network_latency_s=50e-6,
        images_per_s={
            "alexnet": 16 / 20.74e-3,
            "googlenet": 16 / 56.16e-3,
            "vggnet-a": 16 / 182.79e-3 * _A_OVER_16,
        },
    ),
    "infiniband": _Cluster(
        title="(b) P100, NVLink, 100 Gbit/s InfiniBand",
        gpu_bytes_per_s=40e9,
        cpu_bytes_per_s=10e9,
        network_bytes_per_s=12.5e9,
        network_latency_s=2e-6,
        images_per_s={"alexnet": 2987.0, "googlenet": 468.0, "vggnet-a": 144.0 * _A_OVER_16},
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """A speed-up that the paper states in words (§5)."""

    cluster: str
    network: str
    gpus: int
    speedup: float


_CLAIMS = (
    _Claim(cluster="ethernet", network="alexnet", gpus=8, speedup=3.04),
    _Claim(cluster="infiniband", network="vggnet-a", gpus=512, speedup=2.0),
)


class ThroughputFinding(Finding, frozen=True, kw_only=True):
    """Images a second for each number of GPUs in `GPUS`, by what is sent."""

    images_per_s: dict[str, list[float]]


class ThroughputCell(Cell, frozen=True, kw_only=True):
    """One network on one cluster."""

    timed = False
    finding = ThroughputFinding

    network: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.network}, {_CLUSTERS[self.cluster].title}"

    def run(self, on_progress: OnProgress) -> ThroughputFinding:
        """Computes the throughput."""
        profiled_s = _BATCH[self.network] / _CLUSTERS[self.cluster].images_per_s[self.network]
        copied = sent(self.network, FLOAT32, 1).cpu_nbytes

        def images_per_s(what: str, gpus: int) -> float:
            seconds = weak_step_s(machines(self.cluster, gpus), sent(self.network, what, gpus), profiled_s, copied)
            return gpus * _BATCH[self.network] / seconds

        kinds = (FLOAT32, LITERAL, ALGORITHM)
        return ThroughputFinding(images_per_s={what: [images_per_s(what, gpus) for gpus in GPUS] for what in kinds})


def machines(cluster: str, gpus: int) -> Machines:
    """Returns so many GPUs of a cluster: up to four share a machine."""
    of = _CLUSTERS[cluster]
    inside = min(GPUS_PER_MACHINE, gpus)
    return Machines(
        gpus_per_machine=inside,
        machines=gpus // inside,
        gpu_bytes_per_s=of.gpu_bytes_per_s,
        cpu_bytes_per_s=of.cpu_bytes_per_s,
        network_bytes_per_s=of.network_bytes_per_s,
        network_latency_s=of.network_latency_s,
    )


def sent(network: str, what: str, gpus: int) -> Sent:
    """Returns the bytes of an exchange on each hop.

    By the algorithm (§3.1 and §4.2) every GPU is a worker. Gradients travel as float32 within a machine; between
    machines two bits go up and ⌈log₂(2N + 1)⌉ come down, and the last layer stays float32. The model has one size for
    an exchange: their mean.

    >>> sent("alexnet", FLOAT32, 8).network_nbytes / sent("alexnet", LITERAL, 8).network_nbytes
    16.0
    """
    sizes = [each.numel for each in architecture(network)]
    whole, last = sum(sizes), sum(sizes[-2:])
    if what == FLOAT32:
        return Sent.everywhere(4.0 * whole)
    if what == LITERAL:
        return Sent.everywhere(whole / 4)
    if what == ALGORITHM:
        bits = (2 + math.ceil(math.log2(2 * gpus + 1))) / 2
        return Sent(gpu_nbytes=4.0 * whole, cpu_nbytes=4.0 * whole, network_nbytes=(whole - last) * bits / 8 + 4 * last)
    raise ConfigError(f"unknown traffic {what!r}; expected {FLOAT32!r}, {LITERAL!r} or {ALGORITHM!r}")


def implied_images_per_s(cluster: str, network: str, gpus: int, what: str, speedup: float) -> float:
    """Returns the rate of one GPU at which the model says so much speed-up, all else as here; 0 where none does."""
    at = machines(cluster, gpus)
    slow, fast = (communication_s(at, sent(network, each, gpus)) for each in (FLOAT32, what))
    computing_s = (slow - speedup * fast) / (speedup - 1)
    copied_s = sent(network, FLOAT32, 1).cpu_nbytes / at.cpu_bytes_per_s
    return _BATCH[network] / (computing_s + copied_s) if computing_s > 0 else 0.0


def strong_images_per_s(cluster: str, network: str, gpus: int, what: str) -> float:
    """Returns the throughput where a single GPU's batch is divided among all GPUs (equations 27 and 28)."""
    profiled_s = _BATCH[network] / _CLUSTERS[cluster].images_per_s[network]
    copied = sent(network, FLOAT32, 1).cpu_nbytes
    return _BATCH[network] / strong_step_s(machines(cluster, gpus), sent(network, what, gpus), profiled_s, copied)


def _cells(_: Scale) -> Sequence[ThroughputCell]:
    return [ThroughputCell(network=network, cluster=cluster) for cluster in _CLUSTERS for network in _BATCH]


def _show(found: Mapping[ThroughputCell, ThroughputFinding]) -> Shown:
    panels = []
    for name, cluster in _CLUSTERS.items():
        series = [
            Series(label=f"{cell.network}, {what}", x=GPUS, y=finding.images_per_s[what])
            for cell, finding in found.items()
            if cell.cluster == name
            for what in (FLOAT32, ALGORITHM)
        ]
        panels.append(
            Panel(title=cluster.title, x_label="GPUs", y_label="images/s", series=series, x_log=True, y_log=True)
        )
    claims, sizes = [], []
    for claim in _CLAIMS:
        rates = found[ThroughputCell(network=claim.network, cluster=claim.cluster)].images_per_s
        at = GPUS.index(claim.gpus)
        ours = [rates[what][at] / rates[FLOAT32][at] for what in (LITERAL, ALGORITHM)]
        given = _CLUSTERS[claim.cluster].images_per_s[claim.network]
        implied = implied_images_per_s(claim.cluster, claim.network, claim.gpus, ALGORITHM, claim.speedup)
        claims.append(
            [
                f"{claim.network} on {claim.gpus} GPUs, {_CLUSTERS[claim.cluster].title}",
                *(f"{claim.speedup:.2f}×", *(f"{each:.2f}×" for each in ours)),
                *(f"{ours[1] / claim.speedup - 1:+.0%}", f"{given:,.0f}", f"{implied:,.0f}"),
            ]
        )
    for cell, finding in found.items():
        fast, slow = finding.images_per_s[ALGORITHM], finding.images_per_s[FLOAT32]
        points = [GPUS.index(gpus) for gpus in (8, 64, 512)]
        speedups = [f"{fast[point] / slow[point]:.2f}×" for point in points]
        sizes.append(
            [f"{cell.network}, {_CLUSTERS[cell.cluster].title}", *(f"{slow[at]:,.0f}" for at in points), *speedups]
        )
    strong = []
    for cell in found:
        both = [
            [strong_images_per_s(cell.cluster, cell.network, gpus, what) for gpus in (1, 8, 64)]
            for what in (FLOAT32, ALGORITHM)
        ]
        strong.append(
            [
                f"{cell.network}, {_CLUSTERS[cell.cluster].title}",
                *(f"{rate:,.0f}" for rate in both[0]),
                *(f"{fast / slow:.2f}×" for slow, fast in zip(*(each[1:] for each in both), strict=True)),
            ]
        )
    divided = [f"float32 at {gpus}" for gpus in (1, 8, 64)] + [f"speed-up at {gpus}" for gpus in (8, 64)]
    header = ["", "paper", LITERAL, ALGORITHM, "against the paper", "images/s of a GPU", "at which it is the paper's"]
    more = ["", *(f"float32 at {gpus}" for gpus in (8, 64, 512)), *(f"speed-up at {gpus}" for gpus in (8, 64, 512))]
    return Shown(
        setting=(
            "Weak scaling with 128, 64 and 32 images a GPU, four GPUs a machine, equations 29 and 30. Everything is "
            "modelled: PCIe 10 GB/s, NVLink 40 GB/s, links at their nominal rate, single-GPU rates as published of "
            "Torch, TensorFlow and NV-Caffe."
        ),
        tables=[
            Table(header, claims, "Speed-ups that the paper states"),
            Table(more, sizes, "Modelled images a second"),
            Table(["", *divided], strong, "Strong scaling, equations 27 and 28: one GPU's batch divided among all"),
        ],
        charts=[Chart(name="terngrad-figure-5", caption="Modelled training throughput.", panels=panels)],
        notes=[
            "The paper prints its figure without numbers, and neither the profiled seconds of a GPU nor the size of a "
            "ternary gradient. With 2 bits on every hop, as its equations read, both speed-ups come out too large. "
            "With what algorithm 1 sends, and the last layer in float32 as in §4.2, VggNet-A on 512 GPUs comes within "
            "10 %. AlexNet on 8 GPUs does not: the speed-up falls as a GPU gets slower, and 3.04 is that of GPUs at "
            "the rate in the last column. The paper's AlexNet has batch norm behind its convolutions and was profiled "
            "in distributed TensorFlow with its input pipeline; the published rate is of bare forward and backward "
            "passes.",
        ],
    )


SCALED = "The paper's equations and clusters; the seconds of a single GPU, which it does not print, are of others."
ENTRY = scaled("terngrad", SCALED)(
    "figure-5", "throughput to 512 GPUs by the performance model", 0.1, Study(cells=_cells, show=_show)
)
