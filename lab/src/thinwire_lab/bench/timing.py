"""Timing side by side: candidates take turns inside one process, so that a noisy machine hits all alike.

On a GPU, times come from events on the stream: the device is first given something to do, so that the launches are
queued by the time it gets to them and their cost in Python is not counted. Beside candidates stand the loops of what
the machine itself can do: each touches memory as the job that it bounds must, and computes as little as it can.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.kernels.numba.jit import jit

CPU = torch.device("cpu")
HEAD_START_CYCLES = 4_000_000  # a few milliseconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something to time.

    Args:
        name: in the results.
        action: what is timed, given the turn's number. It may return a function to be called when the time was taken.
        prepare: what is done before each turn, untimed.
        turns: how often at most, for candidates that are far slower than the others; None: every turn.
        waits: on a GPU, the action waits for the device itself, so that a head start would be counted.
        whole: on a GPU, time the whole call on the host's clock until the device has finished.
    """

    name: str
    action: Callable[[int], Any]
    prepare: Callable[[int], Any] | None = None
    turns: int | None = None
    waits: bool = False
    whole: bool = False


def side_by_side(
    candidates: Sequence[Candidate], *, turns: int, calls: int = 1, device: torch.device = CPU
) -> dict[str, float]:
    """Returns each candidate's median seconds for one call.

    Args:
        candidates: they take turns in this order, after one untimed turn.
        turns: timed turns of each.
        calls: calls in one turn, for calls that are too short to time; `prepare` comes before each turn.
        device: whose time is taken.
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
                    candidate.prepare(turn)
                take = _host_seconds if device.type != "cuda" or candidate.whole else _device_seconds
                took = take(candidate, turn, calls, device)
                if turn >= 0:
                    seconds[candidate.name].append(took / calls)
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(values) for name, values in seconds.items()}


def _host_seconds(candidate: Candidate, turn: int, calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        finish = candidate.action(turn)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    if callable(finish):
        finish()
    return seconds


def _device_seconds(candidate: Candidate, turn: int, calls: int, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    if not candidate.waits:
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
    """The floor of encoding with a residual: ``r += g``, then ``r = f(r)``; 20 bytes a value for float32.

    Args:
        values: float32[n], read.
        residual: float32[n], read and written twice.
    """
    for i in range(values.size):
        residual[i] += values[i]
    shrink = residual.dtype.type(0.5)
    for i in range(values.size):
        residual[i] *= shrink


@jit
def read_modify_write(out: Any) -> None:
    """The floor of accumulating: every value is read and written once, in place; 8 bytes a value for float32."""
    one = out.dtype.type(1)
    for i in range(out.size):
        out[i] += one
