"""Wu 2018, figures 5.2 and 5.3: the layer sizes of three published networks, and the balance of placements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thinwire.policies.assignment import Sized
from thinwire.policies.placement import placement
from thinwire.presentation.charts import Series
from thinwire.presentation.tables import Table
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.placements import deviation, variation
from thinwire_lab.studies.architectures import architecture
from thinwire_lab.studies.reproduce.entry import Cell, Entry, Finding, Found, Scale, Shown, chart

SERVERS = 4
_NETWORKS = {"resnet110": "ResNet", "googlenet": "GoogLeNet", "inception-v4": "Inception-v4"}
_RISING = "greedy, rising size"
"""The order in the thesis's published code; its algorithm 2 has falling size."""
_POLICIES = {
    "uniform[min=0]": "uniform split",
    "round-robin": "round-robin",
    "heuristic": "heuristic (algorithm 2)",
    _RISING: "smallest first (the thesis' published code)",
}
# Coefficient of variation in percent, and deviation in millions of values, as read from figure 5.3.
_PRINTED = {
    "resnet110": {"uniform[min=0]": "0 %", "round-robin": "16.65 % (.07)", _RISING: "2.71 % (.01)"},
    "googlenet": {"uniform[min=0]": "0 %", "round-robin": "61.93 % (1.08)", _RISING: "18.87 % (.40)"},
    "inception-v4": {"uniform[min=0]": "0 %", "round-robin": "22.78 % (2.01)", _RISING: "5.77 % (.62)"},
}


class NetworkFinding(Finding, frozen=True, kw_only=True):
    """Layer sizes and balance."""

    histogram: dict[int, int]  # tensors by the power of ten of their number of values, rounded down
    variations: dict[str, float]  # by policy, the coefficient of variation in percent
    deviations: dict[str, float]  # by policy, the standard deviation in millions of values
    partitions: dict[str, int]  # by policy, how many pieces there are


class NetworkCell(Cell, frozen=True, kw_only=True):
    """One network, placed on `servers` servers."""

    finding = NetworkFinding

    network: str
    servers: int = SERVERS

    def run(self, tell: Tell) -> NetworkFinding:
        tensors = architecture(self.network)
        tables = [Sized(each.name, each.numel, each.numel) for each in tensors]
        placed = {name: placement(name).place(tables, self.servers) for name in _POLICIES if name != _RISING}
        rising = sorted(tables, key=lambda table: table.numel)
        placed[_RISING] = placement("greedy").place(rising, self.servers)
        powers = [int(math.log10(each.numel)) for each in tensors]
        return NetworkFinding(
            histogram={power: powers.count(power) for power in range(max(powers) + 1)},
            variations={name: variation(each) for name, each in placed.items()},
            deviations={name: deviation(each) / 1e6 for name, each in placed.items()},
            partitions={name: sum(map(len, each.partitions)) for name, each in placed.items()},
        )


def _cells(_: Scale) -> Sequence[NetworkCell]:
    return [NetworkCell(network=network) for network in _NETWORKS]


_SETTING = f"Published layer sizes of ResNet-110, GoogLeNet and Inception-v4; {SERVERS} servers; nothing is trained."


def _show_sizes(found: Found) -> Shown:
    powers = range(max(power for finding in found.values() for power in finding.histogram) + 1)
    names = [f"10^{power}" for power in powers]
    series, lines = [], []
    for cell, finding in found.items():
        counts = [finding.histogram.get(power, 0) for power in powers]
        series.append(Series(label=_NETWORKS[cell.network], x=names, y=counts))
        lines.append([_NETWORKS[cell.network], *map(str, counts), f"{sum(counts)}"])
    return Shown(
        setting=_SETTING,
        tables=[Table(["tensors with at least this many values", *names, "all"], lines, "Layer sizes")],
        charts=[chart("mps-figure-5.2", "Tensors by size.", series, "values from … on", "tensors", kind="bars")],
        notes=["The thesis prints bars without numbers."],
    )


def _show_variation(found: Found) -> Shown:
    lines, series = [], []
    names = [_NETWORKS[cell.network] for cell in found]
    for policy, label in _POLICIES.items():
        series.append(Series(label=label, x=names, y=[finding.variations[policy] for finding in found.values()]))
        for cell, finding in found.items():
            printed = _PRINTED[cell.network].get(policy, "–")
            ours = f"{finding.variations[policy]:.2f} % ({finding.deviations[policy]:.3f})"
            lines.append([_NETWORKS[cell.network], label, printed, ours, str(finding.partitions[policy])])
    header = ["network", "placement", "paper (millions of values)", "ours (millions of values)", "partitions"]
    axes = "", "coefficient of variation, %"
    return Shown(
        setting=_SETTING,
        tables=[Table(header, sorted(lines, key=lambda line: names.index(line[0])), "Variation of load", left=2)],
        charts=[chart("mps-figure-5.3", "Variation of the servers' loads.", series, *axes, kind="bars")],
        notes=[
            "Round-robin depends on the order of the tensors, and the thesis does not give TensorFlow's. The thesis' "
            "heuristic figures stand beside the placement of its published code, smallest tensors first. thinwire "
            "follows algorithm 2, largest first."
        ],
    )


ENTRIES = tuple(
    Entry(paper="mps", item=item, shows=shows, status="done", minutes=0.1, cells=_cells, show=show)
    for item, shows, show in (
        ("figure-5.2", "layer sizes of three models", _show_sizes),
        ("figure-5.3", "variation of placement strategies", _show_variation),
    )
)
