"""Sums of bytes and seconds of one worker since the training began, and the report of them.

`hooks/records.py` has the costs of single steps and tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from thinwire.hooks.report import Report
from thinwire.telemetry import WARM_UP_EXCHANGES, WarmUp


class StepCounter(Protocol):
    """Counts a worker's steps and exchanges."""

    @property
    def iteration(self) -> int:
        """Steps taken."""

    @property
    def clock(self) -> int:
        """Exchanges begun."""

    @property
    def delay(self) -> int:
        """Steps taken while an exchange is under way."""


class TrainingCosts:
    """Sums of a worker's traffic and time from `begin` on.

    Args:
        worker: counts the steps.
        counted: returns bytes, values and seconds so far.
        uncompressed_nbytes: of an uncompressed exchange each way.
    """

    def __init__(
        self, worker: StepCounter, counted: Callable[[], Mapping[str, float]], uncompressed_nbytes: int
    ) -> None:
        self._worker, self._counted, self._uncompressed_nbytes = worker, counted, uncompressed_nbytes
        self._warm_up = WarmUp()
        self._first_step, self._clock = worker.iteration, worker.clock
        self._began, self._joining = time.perf_counter(), dict[str, float]()
        self._before = dict[str, float]()
        """The sums before the first step."""
        self._ends: list[int] = []
        """The numbers of steps after which each of the first exchanges is answered."""
        self._after: list[tuple[int, dict[str, float]]] = []
        """Each of those numbers, with the sums at that step."""
        self._newest = 0
        """The number of steps before the newest exchange began."""

    def begin(self) -> None:
        """Starts counting with the next step: the worker has joined."""
        self._first_step, self._clock = self._worker.iteration, self._worker.clock
        self._began = time.perf_counter()
        self._joining = {name: value for name, value in self._counted().items() if name.endswith("_seconds")}
        self._before = self.traffic()

    def skip_steps(self, steps: int) -> None:
        """Excludes steps that the worker did not take, because it loaded a state of a later step."""
        self._first_step += steps

    def note_step(self) -> None:
        """Records the costs of the first steps and exchanges, which include start-up; called after every step."""
        taken = self._worker.iteration - self._first_step
        if not self._warm_up.over:
            self._warm_up.note(taken, self._sums())
        if self._worker.clock != self._clock:
            self._clock, self._newest = self._worker.clock, taken
            if len(self._ends) < WARM_UP_EXCHANGES:
                self._ends.append(taken + self._worker.delay + 1)  # the step after the delay applies the answer
        if len(self._after) < len(self._ends) and taken >= self._ends[len(self._after)]:
            self._after.append((taken, self._sums()))

    def traffic(self) -> dict[str, float]:
        """See `DistributedOptimizer.traffic`."""
        counted = self._counted()
        # A worker that joins early waits for the others; that time is not training.
        return {**counted, **{name: counted[name] - seconds for name, seconds in self._joining.items()}}

    def totals(self) -> dict[str, Any]:
        """Returns the bytes that all steps so far have sent and received, and their uncompressed size."""
        taken, sums = self._worker.iteration - self._first_step, self._sums()
        return {
            "taken": taken,
            "wire_nbytes": sums["wire_bytes_push"] + sums["wire_bytes_pull"],
            "plain_nbytes": 2 * taken * self._uncompressed_nbytes,
        }

    def report(self) -> Report:
        """See `DistributedOptimizer.report`."""
        taken, sums = self._worker.iteration - self._first_step, self._sums()
        warm_up, since = self._warm_up.split(taken, sums)
        # Leaves out the first exchanges, as long as a later one remains for the means.
        apart = [each for each in self._after if each[0] < self._newest]
        if apart and apart[-1][0] > warm_up:
            warm_up, before = apart[-1]
            since = {name: value - before.get(name, 0) for name, value in sums.items()}
        all_steps, timed = 1 / max(1, taken), 1 / max(1, taken - warm_up)

        def mean(name: str) -> float:
            return since.get(f"{name}_seconds", 0) * timed

        return Report(
            taken=taken,
            steps=taken,
            seconds=since.get("seconds", 0) * timed,
            compute_s=since.get("seconds", 0) * timed - mean("exchange"),
            encode_s=mean("encode"),
            decode_s=mean("decode"),
            wait_s=mean("wait"),
            sent_nbytes=sums["wire_bytes_push"] * all_steps,
            received_nbytes=sums["wire_bytes_pull"] * all_steps,
            uncompressed_nbytes=self._uncompressed_nbytes,
            void_rounds=int(sums.get("void_rounds", 0)),
            warm_up=warm_up,
            warm_up_s=(sums.get("exchange_seconds", 0) - since.get("exchange_seconds", 0)) / max(1, warm_up),
            compiling=bool(self._ends) and len(apart) < WARM_UP_EXCHANGES,
        )

    def _sums(self) -> dict[str, float]:
        """Returns the sums and the seconds since the worker joined."""
        counted = {name: value - self._before.get(name, 0) for name, value in self.traffic().items()}
        return {**counted, "seconds": time.perf_counter() - self._began}


def sent_and_received(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of a `CollectiveDriver` under a worker's names: push for sent, pull for received."""
    return {
        **{f"{name}_seconds": sums.get(f"{name}_seconds", 0.0) for name in ("encode", "decode", "wait")},
        **{f"{name}_bytes_push": sums.get(f"{name}_bytes", 0) for name in ("payload", "wire")},
        **{f"{name}_bytes_pull": sums.get(f"{name}_bytes_received", 0) for name in ("payload", "wire")},
    }
