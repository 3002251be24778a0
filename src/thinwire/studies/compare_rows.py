"""What the runs of a comparison come to: a row of means over seeds for each model, design and link.

It computes from runs that are kept and starts none; a figure whose runs are missing is None, and nothing is guessed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.engines.links import parse_rate
from thinwire.jobs import results as kept_runs
from thinwire.jobs.job import Job

Cell = tuple[str, str, str, int]
"""Model, design, link, seed."""

_Pair = tuple[dict[str, Any] | None, dict[str, Any] | None]


def tabulate(
    cells: Mapping[Cell, tuple[Job, Job]], runs: Sequence[dict[str, Any]], shaping: str
) -> list[dict[str, Any]]:
    """Returns one row for each model, design and link: means over seeds, and standard deviations as `…_std`.

    A standard deviation of fewer than two runs is None, as is a figure whose runs are missing. `accuracy_difference`
    and `speedup` are against the first design, paired by seed. `training_seconds` is extrapolated:
    t_full · s_short / s_full (3LC §4.3). Runs in one process (`in_process`) are not timed.

    Args:
        cells: of the comparison.
        runs: what is kept, of this comparison or of others.
        shaping: the comparison's.
    """
    rows: dict[tuple[str, str, str], list[_Pair]] = {}
    for (model, design, link, _), (full, timed) in cells.items():
        pair = kept_runs.outcome(runs, full, shaping), _timed(kept_runs.outcome(runs, timed, shaping))
        rows.setdefault((model, design, link), []).append(pair)
    first = next(iter(rows))[1]
    return [
        {"model": model, "design": design, "link": str(parse_rate(link))} | _row(pairs, rows[model, first, link])
        for (model, design, link), pairs in rows.items()
    ]


def _timed(outcome: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if outcome is None or outcome.get("in_process") else outcome


def _row(pairs: Sequence[_Pair], base: Sequence[_Pair]) -> dict[str, Any]:
    fulls = [full for full, _ in pairs if full]
    timed = [short for _, short in pairs if short]
    both = [(full, short) for full, short in pairs if full and short]
    better = [
        full["test_accuracy"] - first["test_accuracy"] for (full, _), (first, _) in _zip(pairs, base) if full and first
    ]
    faster = [
        first["seconds_per_step"] / short["seconds_per_step"]
        for (_, short), (_, first) in _zip(pairs, base)
        if short and first
    ]
    figures = {
        "test_accuracy": [full["test_accuracy"] for full in fulls],
        "accuracy_difference": better,
        "train_loss": [full["train_loss"] for full in fulls],
        "bits_per_value_push": [full["bits_per_value_push"] for full in fulls],
        "bits_per_value_pull": [full["bits_per_value_pull"] for full in fulls],
        "compression_ratio": [full["compression_ratio"] for full in fulls],
        "seconds_per_step": [short["seconds_per_step"] for short in timed],
        "speedup": faster,
        "training_seconds": [
            full["seconds"] * short["seconds_per_step"] / full["seconds_per_step"] for full, short in both
        ],
    }
    row: dict[str, Any] = {
        "runs": len(fulls),
        "steps": fulls[0]["steps"] if fulls else None,
        "timed_runs": len(timed),
        "timed_steps": timed[0]["steps"] if timed else None,
        "shaping": sorted({short["shaping"] for short in timed}),
    }
    for name, values in figures.items():
        row[name] = statistics.fmean(values) if values else None
        row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
    return row


def _zip(pairs: Sequence[_Pair], base: Sequence[_Pair]) -> list[tuple[_Pair, _Pair]]:
    return list(zip(pairs, base, strict=True))
