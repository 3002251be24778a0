"""Wu 2018, table 1.1 and figures 1.1, 5.1 and 5.4: bits of gradients in a second, and speed-ups over a single machine.

The table is arithmetic, with the figures of networks on this machine beside it. For a link the figure's three networks
differ in that number alone, so one network behind three links represents them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.studies.architectures import architecture
from thinwire_lab.studies.reproduce import mps_nodes as on
from thinwire_lab.studies.reproduce.entry import Finding, Found, Scale, Shown, chart, scaled
from thinwire_lab.studies.reproduce.job_cells import JobCell
from thinwire_lab.studies.reproduce.mps_nodes import NodesCell

# Name, batch, parameters as printed, steps a second and bits a second of table 1.1; and the known architecture.
_TABLE = (
    ("ResNet", 64, 1.73e6, 13.5, "746.5M", "resnet110"),
    ("DenseNet", 64, 2.22e6, 2.92, "207.2M", None),
    ("Inception-v4", 32, 42.65e6, 1.47, "2.01G", "inception-v4"),
)
_ASYNC = "fp32[placement=round-robin,consistency=asp]"
_NETWORKS = {on.RESNET: "ResNet", on.DENSENET: "DenseNet", on.INCEPTION: "Inception-v4"}
# Read from figure 1.1 by eye: percent of a single machine's time, synchronous and asynchronous, on 2 and 4 machines.
_FIGURE = {"ResNet": (92, 115, 83, 98), "DenseNet": (76, 73, 64, 58), "Inception-v4": (125, 112, 174, 138)}
_CASES = ((on.TENSORFLOW, 2), (on.TENSORFLOW, 4), (_ASYNC, 2), (_ASYNC, 4))


class SingleFinding(Finding, frozen=True, kw_only=True):
    """Processor seconds of a step, and the bits of gradients a second."""

    seconds: float
    bps: float


class SingleCell(JobCell, frozen=True, kw_only=True):
    """A few steps of a single machine."""

    finding = SingleFinding

    workers: int = 1
    design: str = "fp32"
    batch: int = 16

    def run(self, tell: Tell) -> SingleFinding:
        seconds = statistics.median(on.single_steps(self.job()))
        return SingleFinding(seconds=seconds, bps=on.generated_bps(self.job(), seconds))


def _single_cells(scale: Scale) -> list[SingleCell]:
    networks = ("mlp", "lenet5", "resnet8", "resnet20")
    chosen = dict.fromkeys(on.pair(scale, each) for each in networks)
    return [SingleCell(model=model, data=data) for model, data in chosen]


def _show_table(found: Found) -> Shown:
    lines = []
    for name, batch, rounded, rate, printed, known in _TABLE:
        exact = rounded if known is None else float(sum(each.numel for each in architecture(known)))
        counted = "not said which" if known is None else f"{exact / 1e6:.3f}M ({known})"
        ours = f"{32 * exact * rate / 1e6:,.1f}M"
        lines.append([name, str(batch), f"{rounded / 1e6:.2f}M", counted, f"{rate:g}", printed, ours])
    header = ["", "batch", "parameters, thesis", "counted by us", "step/s, thesis", "bps, thesis", "bps by our count"]
    here = []
    for cell, f in found.items():
        parameters = f"{f.bps * f.seconds / 32 / 1e6:.3f}M"
        here.append([cell.model, str(cell.batch), parameters, f"{1 / f.seconds:.1f}", f"{f.bps / 1e6:,.0f}M"])
    return Shown(
        setting=f"Ours: one core of {os.cpu_count()}, a plain loop without thinwire, batches as said.",
        tables=[
            Table(header, lines, "Table 1.1: bits of gradients in a second, 32 · parameters · steps a second"),
            Table(["", "batch", "parameters", "step/s", "bps"], here, "The same of networks on this machine"),
        ],
        notes=["The thesis does not say which DenseNet has 2.22 million parameters: the printed number is taken."],
    )


def _time_cells(scale: Scale) -> list[NodesCell]:
    machines = (2, 4) if scale != "tiny" else (2,)
    return [
        cell
        for share in _NETWORKS
        for count in machines
        for cell in on.nodes((on.TENSORFLOW, _ASYNC), scale, share, workers=count)
    ]


def _show_times(found: Found) -> Shown:
    ours = {(c.generated, c.design, c.workers): 100 / on.speedup(c, f) for c, f in found.items()}
    lines, panels = [], []
    for share, network in _NETWORKS.items():
        for (design, count), printed in zip(_CASES, _FIGURE[network], strict=True):
            value = ours.get((share, design, count))
            kind = "synchronous" if design == on.TENSORFLOW else "asynchronous"
            shown = "–" if value is None else f"{value:.0f} %"
            lines.append([network, kind, str(count), f"{printed} %", shown])
        cases = [each for each in _CASES if (share, *each) in ours]
        names = [f"{'sync' if design == on.TENSORFLOW else 'async'} {count}" for design, count in cases]
        printed_bars = [_FIGURE[network][_CASES.index(each)] for each in cases]
        bars = [ours[(share, *each)] for each in cases]
        panels.append(_bars(f"{network}: {share:g} of the link", "time, %", names, printed_bars, bars))
    header = ["", "", "machines", "time, thesis", "ours, modelled"]
    return Shown(
        setting=on.setting(found),
        tables=[Table(header, lines, "Training time for as many iterations, of a single machine's", left=2)],
        charts=[Chart(name="mps-figure-1.1", caption="Training time in percent of a single machine's.", panels=panels)],
        notes=[
            "The thesis's numbers are read by eye. It says neither how many servers TensorFlow had nor where, so that "
            "only the order compares: the more a machine generates of its link, the less a second machine gains.",
            on.MODELLED,
        ],
    )


_PLACEMENTS = {"fp32[placement=uniform[min=0]]": "uniform split", on.TENSORFLOW: "round-robin", on.SYNC: "heuristic"}
# Read from figure 5.1, in the order of the placements.
_FIGURE_1 = {"ResNet": (0.87, 2.24, 2.26), "GoogLeNet": (0.66, 0.58, 0.66), "Inception-v4": (0.97, 0.95, 0.96)}
_GRID = [on.TENSORFLOW, on.TRADITIONAL, on.SYNC, on.SYNC_TOP, on.STALE, on.STALE_TOP]
_UNPRINTED = [on.TRADITIONAL_TOP, on.TRADITIONAL_STALE, on.TRADITIONAL_STALE_TOP]
# Read from figure 5.4, in the order of the grid; the first is the thesis's TensorFlow.
_FIGURE_4 = {"ResNet": (2.19, 1.38, 2.13, 3.22, 3.30, 3.91), "Inception-v4": (1.03, 0.72, 0.93, 2.97, 2.53, 3.78)}
_SHARES = {on.RESNET: "ResNet", on.INCEPTION: "Inception-v4"}


def _placement_cells(scale: Scale) -> list[NodesCell]:
    designs = list(_PLACEMENTS)
    even = [cell for share in _SHARES for cell in on.nodes(designs, scale, share)]
    return list(dict.fromkeys([*even, *on.nodes(designs, scale, on.INCEPTION, network="lenet5")]))


def _stands_for(cell: NodesCell) -> str:
    """Returns the thesis's network that a cell represents."""
    return "GoogLeNet" if cell.model == "lenet5" else _SHARES[cell.generated]


def _show_placements(found: Found) -> Shown:
    lines, series = [], []
    groups = list(dict.fromkeys(_stands_for(cell) for cell in found))
    for number, (design, label) in enumerate(_PLACEMENTS.items()):
        mine = {_stands_for(cell): (cell, finding) for cell, finding in found.where(design=design).items()}
        ours = [on.speedup(*mine[group]) for group in groups]
        series.append(Series(label=label, x=groups, y=ours))
        for group, value in zip(groups, ours, strict=True):
            cell, finding = mine[group]
            where = f"{group}: {cell.model}, {cell.generated:g} generated"
            lines.append([where, label, f"{_FIGURE_1[group][number]:.2f}", f"{value:.2f}", _kb(finding.sent_bytes)])
    lines.sort(key=lambda line: groups.index(line[0].partition(":")[0]))
    header = ["the thesis's network: ours", "placement", "speed-up, thesis", "ours, modelled", "sent by a machine, kB"]
    about = "mps-figure-5.1", "Speed-up over a single machine, modelled."
    return Shown(
        setting=on.setting(found),
        tables=[Table(header, lines, "Speed-up of placements, synchronous and uncompressed", left=2)],
        charts=[chart(*about, series, "", "speed-up over a single machine", kind="bars")],
        notes=[
            "Here partitions that go to one server share a message, so that a uniform split costs far less than in the "
            "thesis. LeNet-5 stands for GoogLeNet: one of its tensors has most of its values.",
            on.MODELLED,
        ],
    )


def _grid_cells(scale: Scale) -> list[NodesCell]:
    return [cell for share in _SHARES for cell in on.nodes([*_GRID, *_UNPRINTED], scale, share)]


def _show_grid(found: Found) -> Shown:
    lines, panels = [], []
    for share, network in _SHARES.items():
        mine = {cell.design: (cell, finding) for cell, finding in found.where(generated=share).items()}
        printed: dict[str, float] = dict(zip(_GRID, _FIGURE_4[network], strict=True))
        ours = {design: on.speedup(*mine[design]) for design in [*_GRID, *_UNPRINTED]}
        for design, value in ours.items():
            paper = f"{printed[design]:.2f}" if design in printed else "–"
            lines.append([network, on.LABELS[design], paper, f"{value:.2f}", _kb(mine[design][1].sent_bytes)])
        names = [on.LABELS[design] for design in _GRID]
        bars = [ours[design] for design in _GRID]
        panels.append(_bars(f"as thin a link as {network}'s", "speed-up", names, list(printed.values()), bars))
    header = ["link of", "", "speed-up, thesis", "ours, modelled", "sent by a machine, kB a step"]
    return Shown(
        setting=on.setting(found),
        tables=[Table(header, lines, "Speed-up over a single machine; in theory the number of machines", left=2)],
        charts=[Chart(name="mps-figure-5.4", caption="Speed-up of combinations over one machine.", panels=panels)],
        notes=["A synchronous step with variables placed in turn stands for TensorFlow.", on.MODELLED],
    )


def _bars(title: str, y: str, names: Sequence[str], thesis: Sequence[float], ours: Sequence[float]) -> Panel:
    series = [
        Series(label="thesis", x=names, y=thesis, role="paper"),
        Series(label="ours, modelled", x=names, y=ours),
    ]
    return Panel(title=title, x_label="", y_label=y, series=series, kind="bars")


def _kb(nbytes: float) -> str:
    return f"{nbytes / 1e3:,.1f}"


_SPEEDUPS = scaled(
    *("mps", on.SCALED),
    ("figure-5.1", "speed-up of placement strategies", 1, _placement_cells, _show_placements),
    ("figure-5.4", "speed-up of consistency and compression combined", 2, _grid_cells, _show_grid),
)

_OURS = "Steps a second are the thesis's, and those of small networks on a processor beside them."
_NO_TENSORFLOW = f"TensorFlow is not here: synchronous and asynchronous steps of variables in turn. {on.SCALED}"
_TIMES = "training time of distributed TensorFlow, three networks, 2 and 4 machines"
ENTRIES = (
    *scaled(
        *("mps", _OURS),
        ("table-1.1", "bits of gradients that networks generate in a second", 0.2, _single_cells, _show_table),
    ),
    *scaled("mps", _NO_TENSORFLOW, ("figure-1.1", _TIMES, 1, _time_cells, _show_times)),
    *_SPEEDUPS,
)
