"""Findings of trainings that tests make up."""

from __future__ import annotations

from typing import Any

from thinwire_lab.jobs.history import StepHistory
from thinwire_lab.studies.reproduce.job_cells import TrainingFinding


def trained(*evaluations: tuple[int, float], losses: tuple[float, ...] = (1.0,)) -> TrainingFinding:
    """Returns a finding with these evaluations and losses; everything else is 1."""
    one: dict[str, Any] = {name: [1.0] for name in ("bits_push", "bits_pull", "lags")}
    history = StepHistory(losses=list(losses), payload_bytes_push=[1], payload_bytes_pull=[1], **one)
    figures: dict[str, Any] = dict.fromkeys(("test_loss", "bits_push", "bits_pull", "compression_ratio", "lag"), 1.0)
    return TrainingFinding(
        evaluations=list(evaluations) or [(1, 0.9)], lr=0.01, batch=16, weights="", history=history, **figures
    )
