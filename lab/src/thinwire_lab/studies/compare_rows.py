"""The results of a comparison: a row of means over seeds for each model, design and link, and their deviations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from thinwire.transports.links import parse_rate
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome

ComparedCell = tuple[str, str, str, int]  # model, design, link, seed

_Pair = tuple[RunOutcome | None, RunOutcome | None]  # the outcomes that accuracy and seconds per step come from


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One design on one link: means over seeds and standard deviations, by name.

    A mean without runs is None, and so is a standard deviation of fewer than two runs. `accuracy_difference` and
    `speedup` are against the first design, paired by seed. `training_seconds` is extrapolated as in 3LC §4.3:
    t_full · s_short / s_full. Runs in one process have no seconds.
    """

    model: str
    design: str
    link: str
    runs: int
    steps: int | None
    timed_runs: int
    timed_steps: int | None
    shaping: list[str]
    means: dict[str, float | None]
    deviations: dict[str, float | None]


def tabulate(cells: Mapping[ComparedCell, tuple[Job, Job]], find: Callable[[Job], RunOutcome | None]) -> list[Row]:
    """Returns one row for each model, design and link."""
    rows: dict[tuple[str, str, str], list[_Pair]] = {}
    for (model, design, link, _), (full, timed) in cells.items():
        short = find(timed)
        pair = find(full), None if short is None or short.in_process is True else short
        rows.setdefault((model, design, link), []).append(pair)
    first = next(iter(rows))[1]
    return [_row(key, pairs, rows[key[0], first, key[2]]) for key, pairs in rows.items()]


def _row(key: tuple[str, str, str], pairs: list[_Pair], base: list[_Pair]) -> Row:
    fulls = [full for full, _ in pairs if full]
    timed = [short for _, short in pairs if short]
    both = [(full, short) for full, short in pairs if full and short]
    against = [(*pair, *first) for pair, first in zip(pairs, base, strict=True)]
    values = {
        "test_accuracy": [full.test_accuracy for full in fulls],
        "test_loss": [full.test_loss for full in fulls],
        "accuracy_difference": [a.test_accuracy - b.test_accuracy for a, _, b, _ in against if a and b],
        "train_loss": [full.train_loss for full in fulls],
        "bits_per_value_push": [full.bits_per_value_push for full in fulls],
        "bits_per_value_pull": [full.bits_per_value_pull for full in fulls],
        "compression_ratio": [full.compression_ratio for full in fulls],
        "seconds_per_step": [short.seconds_per_step for short in timed],
        "speedup": [b.seconds_per_step / a.seconds_per_step for _, a, _, b in against if a and b],
        "training_seconds": [full.seconds * short.seconds_per_step / full.seconds_per_step for full, short in both],
    }
    model, design, link = key
    return Row(
        model=model,
        design=design,
        link=str(parse_rate(link)),
        runs=len(fulls),
        steps=fulls[0].steps if fulls else None,
        timed_runs=len(timed),
        timed_steps=timed[0].steps if timed else None,
        shaping=sorted({short.shaping for short in timed}),
        means={name: statistics.fmean(each) if each else None for name, each in values.items()},
        deviations={name: deviation(each) if len(each) > 1 else None for name, each in values.items()},
    )


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation; NaN for fewer than two values and for infinite ones."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def spread(values: Sequence[float], digits: int) -> str:
    """Returns the text behind a mean: ± and the standard deviation; empty for fewer than two values."""
    return f" ± {deviation(values):.{digits}f}" if len(values) > 1 else ""
