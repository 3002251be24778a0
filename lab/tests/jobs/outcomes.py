"""Sample outcomes for tests."""

from __future__ import annotations

from typing import Any

from thinwire_lab.jobs.outcome import PlacementSummary, RunOutcome, WorkerOutcome

PLACEMENT = PlacementSummary(loads=[1.0], coefficient_of_variation=0.0, standard_deviation=0.0, digest="d")


def worker_outcome(rank: int, **changes: Any) -> WorkerOutcome:
    """One worker's outcome: rank 0 with scores."""
    usual: dict[str, Any] = {
        "steps": 5,
        "seconds": 2.0,
        "seconds_per_step": 0.5,
        "train_loss": 1.0 + rank,
        "weights": "abc",
        "traffic": {
            "payload_bytes_push": 100,
            "payload_bytes_pull": 300,
            "values_push": 1000,
            "values_pull": 1000,
            "wire_bytes_push": 150,
            "wire_bytes_pull": 350,
            "wait_seconds": 1.0,
        },
        "placement": PLACEMENT,
    }
    scores: dict[str, Any] = {"test_accuracy": 0.5, "test_loss": 1.5, "residual_ratio": {"w": 0.25}}
    return WorkerOutcome(rank=rank, **{**usual, **(scores if rank == 0 else {}), **changes})


def run_outcome(**changes: Any) -> RunOutcome:
    """A run's outcome."""
    zeros = ("seed", "late_pushes", "skipped_updates", "seconds_encode", "seconds_decode", "seconds_wait")
    usual: dict[str, Any] = {**dict.fromkeys(zeros, 0), **dict.fromkeys(("link", "shaping"), "none")}
    usual |= {"design": "fp32", "model": "mlp", "data": "digits", "workers": 4, "servers": 1, "steps": 5}
    usual |= {"seconds": 1.0, "seconds_per_step": 0.25, "test_accuracy": 0.75, "train_loss": 0.1, "test_loss": 0.2}
    usual |= {"payload_bytes_push": 100, "payload_bytes_pull": 300, "wire_bytes_push": 150, "wire_bytes_pull": 350}
    usual |= {"bits_per_value_push": 0.5, "bits_per_value_pull": 0.25, "compression_ratio": 85.3, "curve": []}
    usual |= {"choices": {}, "placement": PLACEMENT, "residual_ratio": {}, "weights": "abc", "batch": 8, "lr": 0.02}
    return RunOutcome(**{**usual, **changes})
