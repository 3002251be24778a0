"""Timing side by side: candidates alternate inside one process, so that noise affects all equally.

On a GPU, times come from events on the stream. The device first gets other work, so that all launches are queued before
it reaches them, and their cost in Python does not count.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from thinwire.kernels.numba.jit import jit

CPU = torch.device("cpu")
HEAD_START_CYCLES = 4_000_000  # a few milliseconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A timed action, which takes the turn's number and may return a function to call after the clock is read.

    Attributes:
        turns: maximum number of turns, for slow candidates; None: every turn.
    """

    name: str
    action: Callable[[int], Any]
    prepare: Callable[[int], Any] | None = None
    turns: int | None = None


def side_by_side(
    candidates: Sequence[Candidate], *, turns: int, calls: int = 1, device: torch.device = CPU
) -> dict[str, float]:
    """Returns each candidate's median seconds for one call."""
    take: Callable[[Candidate, int, int], float] = _host_seconds
    if device.type == "cuda":
        take = partial(_device_seconds, device)
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(-1, turns):
            for candidate in candidates:
                if candidate.turns is not None and turn >= candidate.turns:
                    continue
                if candidate.prepare is not None:
                    candidate.prepare(turn)
                took = take(candidate, turn, calls)
                if turn >= 0:
                    seconds[candidate.name].append(took / calls)
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(values) for name, values in seconds.items()}


def _host_seconds(candidate: Candidate, turn: int, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        finish = candidate.action(turn)
    seconds = time.perf_counter() - begin
    if callable(finish):
        finish()
    return seconds


def _device_seconds(device: torch.device, candidate: Candidate, turn: int, calls: int) -> float:
    torch.cuda.synchronize(device)
    torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        finish = candidate.action(turn)
    end.record()
    torch.cuda.synchronize(device)
    if callable(finish):
        finish()
    return 1e-3 * float(begin.elapsed_time(end))


@jit
def two_pass_floor(values: Any, residual: Any) -> None:
    """The floor of encoding with a residual: ``r += g``, then ``r = f(r)``; 20 bytes a value for float32."""
    for i in range(values.size):
        residual[i] += values[i]
    shrink = residual.dtype.type(0.5)
    for i in range(values.size):
        residual[i] *= shrink
