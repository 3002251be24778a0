"""Made-up findings, and the items that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from thinwire_lab.jobs.history import StepHistory
from thinwire_lab.studies.reproduce.entry import Entry, Finding, Found, Scale, Shown
from thinwire_lab.studies.reproduce.job_cells import TrainingFinding
from thinwire_lab.studies.reproduce.mps_nodes import NodesFinding


def shown(entries: Iterable[Entry], item: str, scale: Scale, made_up: Callable[[Any], Finding]) -> Shown:
    """Shows an item with a made-up finding of each cell."""
    [entry] = [entry for entry in entries if entry.item == item]
    return entry.show(Found({cell: made_up(cell) for cell in entry.cells(scale)}))


def trained(*evaluations: tuple[int, float]) -> TrainingFinding:
    """Returns a finding with these evaluations; everything else is 1."""
    history = StepHistory(losses=[1.0], bits_push=[1.0], bits_pull=[1.0])
    figures: dict[str, Any] = dict.fromkeys(("bits_push", "bits_pull", "compression_ratio", "lag"), 1.0)
    return TrainingFinding(evaluations=list(evaluations) or [(1, 0.9)], lr=0.01, batch=16, history=history, **figures)


def timed(seconds_per_step: float, single_s: float) -> NodesFinding:
    """Returns a finding of machines with these seconds."""
    return NodesFinding(
        seconds_per_step=seconds_per_step, single_s=single_s, link="100mbit", shaping="kernel", sent_bytes=1000.0
    )
