"""Wu 2018, figures 5.1 and 5.4: speed-ups of placements, and of consistency and compression combined."""

from __future__ import annotations

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.reproduce import mps_nodes as on
from thinwire_lab.studies.reproduce.entry import Found, Scale, Shown, chart, scaled
from thinwire_lab.studies.reproduce.mps_nodes import NodesCell

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
    """The thesis's network for which a cell stands."""
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
        bars = [
            Series(label="thesis", x=names, y=list(printed.values()), role="paper"),
            Series(label="ours, modelled", x=names, y=[ours[design] for design in _GRID]),
        ]
        title = f"as thin a link as {network}'s"
        panels.append(Panel(title=title, x_label="", y_label="speed-up", series=bars, kind="bars"))
    header = ["link of", "", "speed-up, thesis", "ours, modelled", "sent by a machine, kB a step"]
    return Shown(
        setting=on.setting(found),
        tables=[Table(header, lines, "Speed-up over a single machine; in theory the number of machines", left=2)],
        charts=[Chart(name="mps-figure-5.4", caption="Speed-up of combinations over one machine.", panels=panels)],
        notes=["A synchronous step with variables placed in turn stands for TensorFlow.", on.MODELLED],
    )


def _kb(nbytes: float) -> str:
    return f"{nbytes / 1e3:,.1f}"


ENTRIES = scaled(
    *("mps", on.SCALED),
    ("figure-5.1", "speed-up of placement strategies", 1, _placement_cells, _show_placements),
    ("figure-5.4", "speed-up of consistency and compression combined", 2, _grid_cells, _show_grid),
)
