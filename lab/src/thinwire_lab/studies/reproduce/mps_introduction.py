"""Wu 2018, table 1.1 and figure 1.1: bits of gradients generated in a second, and what they do to distributed training.

The table is arithmetic; beside it stands what networks generate on this machine. The figure's three networks differ,
for a link, in that number alone: one network behind three links stands for them.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.jobs.job import Job
from thinwire_lab.studies.architectures import architecture
from thinwire_lab.studies.reproduce import mps_nodes as on
from thinwire_lab.studies.reproduce.entry import Finding, Found, OnProgress, Scale, Shown, scaled
from thinwire_lab.studies.reproduce.job_cells import JobCell
from thinwire_lab.studies.reproduce.mps_nodes import NodesCell

# Name, batch, parameters as printed, steps a second and bits a second of table 1.1; and whose layers are known.
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

    model: str
    data: str
    batch: int = 16

    def job(self, **more: Any) -> Job:
        return super().job(design="fp32", workers=1, **more)

    def run(self, on_progress: OnProgress) -> SingleFinding:
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
        bars = [
            Series(label="thesis", x=names, y=printed_bars, role="paper"),
            Series(label="ours, modelled", x=names, y=[ours[(share, *each)] for each in cases]),
        ]
        title = f"{network}: {share:g} of the link"
        panels.append(Panel(title=title, x_label="", y_label="time, %", series=bars, kind="bars"))
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


_OURS = "Steps a second are the thesis's, and those of small networks on a processor beside them."
_NO_TENSORFLOW = f"TensorFlow is not here: synchronous and asynchronous steps of variables in turn. {on.SCALED}"
_TIMES = "training time of distributed TensorFlow, three networks, 2 and 4 machines"
ENTRIES = (
    *scaled(
        *("mps", _OURS),
        ("table-1.1", "bits of gradients that networks generate in a second", 0.2, _single_cells, _show_table),
    ),
    *scaled("mps", _NO_TENSORFLOW, ("figure-1.1", _TIMES, 1, _time_cells, _show_times)),
)
