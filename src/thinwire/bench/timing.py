"""Timing side by side: candidates take turns inside one process, so that a noisy machine hits all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Action = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something to time.

    Args:
        name: in the results.
        action: what is timed.
        prepare: what is done before each turn, untimed.
        turns: how often at most, for candidates that are far slower than the others; None: every turn.
    """

    name: str
    action: Action
    prepare: Action | None = None
    turns: int | None = None


def side_by_side(candidates: Sequence[Candidate], *, turns: int, calls: int = 1) -> dict[str, float]:
    """Returns each candidate's median seconds for one call.

    Args:
        candidates: they take turns in this order, after one untimed turn.
        turns: timed turns of each.
        calls: calls in one turn, for calls that are too short to time; `prepare` comes before each turn.
    """
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(-1, turns):
            for candidate in candidates:
                if candidate.turns is not None and turn >= candidate.turns:
                    continue
                if candidate.prepare is not None:
                    candidate.prepare()
                begin = time.perf_counter()
                for _ in range(calls):
                    candidate.action()
                if turn >= 0:
                    seconds[candidate.name].append((time.perf_counter() - begin) / calls)
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keeps torch's operators to one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
