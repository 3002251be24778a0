"""A race: which DDP hook brings a model to a test accuracy in the fewest seconds of training on a thin link.

All runners have the same model, weights, data order, batches and learning rates by step, so what differs is how long a
step takes and how many of them the target needs. Who needs a careful beginning says so in its name, as in
`3lc[s=1.75,start_step=50]`, and pays for its uncompressed steps on the clock. The clock stands still while rank 0
scores the model on a fixed part of the test set. Whoever has trained for several times the best time so far, without
the target, is out: its row says so, and its time is then a lower bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from thinwire.bench.hook_names import hook
from thinwire.bench.hooks import Cell, OnEvent, attempt
from thinwire.errors import ConfigError

LATE = "3lc[s=1.75,entropy=zstd,start_step=25]"
"""Without the uncompressed steps it diverges at the rate that all share: its residual lags more steps than that."""

RUNNERS = ("3lc[s=1.0]", "powersgd-1", LATE, "powersgd-2", "powersgd-4", "fp16", "bf16")
"""Who runs unless told otherwise. Whoever sends little comes first: the best time so far is what stops the others."""


def race(
    course: Cell,
    hooks: Sequence[str],
    seeds: Iterable[int],
    rank_command: Iterable[str],
    *,
    give_up: float = 3.0,
    on_event: OnEvent = lambda process, event: None,
) -> Iterator[dict[str, Any]]:
    """Runs every hook with every seed, one after the other, and yields each outcome as soon as it is there.

    Args:
        course: model, data, link, `target`, `steps` (at most so many; the learning rate's schedule is as long) and
            all else; its hook and seed are not used.
        hooks: who runs, in this order.
        seeds: of weights, batches and random codecs; every hook runs with each.
        rank_command: as in `run_cell`.
        give_up: a runner is out after so many times the best time of its seed so far.
        on_event: hears what the ranks report.

    Returns:
        Outcomes of `attempt`: `ended` is `"target"`, `"steps"` (not reached), `"limit"` (out) or `"error"`.

    Raises:
        ConfigError: no target, no hook, or a `give_up` of less than 1.
    """
    if course.target is None or not hooks or not give_up >= 1:
        raise ConfigError(
            f"a race needs a target accuracy, hooks and give_up of 1 or more; it was given {course.target}, "
            f"{list(hooks)} and {give_up}"
        )
    return _run(course, hooks, seeds, tuple(rank_command), give_up, on_event)


def _run(
    course: Cell,
    hooks: Sequence[str],
    seeds: Iterable[int],
    rank_command: Sequence[str],
    give_up: float,
    on_event: OnEvent,
) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        best: float | None = None
        for name in hooks:
            outcome = attempt(
                replace(course, hook=name, seed=seed),
                rank_command,
                limit_s=None if best is None else give_up * best,
                on_event=on_event,
            )
            reached = outcome["seconds_to_target"]
            if reached is not None:
                best = reached if best is None else min(best, reached)
            yield outcome


def standings(outcomes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each model, link and hook, of what has been run so far.

    Args:
        outcomes: of `race`, of any number of courses.

    Returns:
        `model`, `link`, `hook`; `seconds` (to the target) and `steps` by seed, None where it was not reached; their
        median `median_seconds`, None unless more than half of the seeds reached it (those that did not count as the
        slowest); `trained_seconds` by seed, which is a lower bound where the target was not reached; `ended` by seed;
        `of_best_stock`, the median over that of the best stock hook on the same model and link.

    Example:
        >>> run = {"model": "lenet", "link": "10mbit", "seed": 0, "ended": "target", "seconds": 9.0,
        ...        "target": 0.8, "curve": [{"step": 50, "seconds": 8.0, "accuracy": 0.81}]}
        >>> rows = standings([run | {"hook": "powersgd-1", "seconds_to_target": 8.0},
        ...                   run | {"hook": "3lc", "seconds_to_target": 6.0}])
        >>> [(row["hook"], row["of_best_stock"]) for row in rows]
        [('powersgd-1', 1.0), ('3lc', 0.75)]
    """
    rows: dict[tuple[str, str | None, str], dict[str, Any]] = {}
    for outcome in outcomes:
        key = (outcome["model"], outcome["link"], outcome["hook"])
        names = ("seconds", "steps", "trained_seconds", "ended")
        row = rows.setdefault(key, dict(zip(("model", "link", "hook"), key, strict=True)) | {n: {} for n in names})
        seed = outcome["seed"]
        row["seconds"][seed] = outcome["seconds_to_target"]
        row["steps"][seed] = next(
            (int(p["step"]) for p in outcome["curve"] if p["accuracy"] >= outcome["target"]), None
        )
        row["trained_seconds"][seed] = outcome["seconds"]
        row["ended"][seed] = outcome["ended"]
    for row in rows.values():
        median = statistics.median(math.inf if seconds is None else seconds for seconds in row["seconds"].values())
        row["median_seconds"] = median if math.isfinite(median) else None
    for (model, link, _), row in rows.items():
        stock = [
            other["median_seconds"]
            for (m, at, name), other in rows.items()
            if (m, at) == (model, link) and hook(name).stock and other["median_seconds"] is not None
        ]
        own = row["median_seconds"]
        row["of_best_stock"] = own / min(stock) if stock and own is not None else None
    return list(rows.values())
