"""Sums of bytes and seconds of one worker since the training began, and the report of them.

`hooks/records.py` has the costs of single steps and tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from thinwire.hooks.report import Report
from thinwire.telemetry import WARM_UP_EXCHANGES, WarmUp


class Trains(Protocol):
    """Who takes the steps."""

    @property
    def iteration(self) -> int:
        """Steps taken."""

    @property
    def clock(self) -> int:
        """Exchanges that have begun."""

    @property
    def delay(self) -> int:
        """Steps that are taken while an exchange is under way."""


class TrainingCosts:
    """Sums over the steps that a worker takes from `begin` on, and the clock beside them.

    Args:
        worker: takes the steps.
        counted: returns bytes, values and seconds so far.
        uncompressed_nbytes: of an exchange each way, if nothing were coded.
    """

    def __init__(self, worker: Trains, counted: Callable[[], Mapping[str, float]], uncompressed_nbytes: int) -> None:
        self._worker, self._counted, self._uncompressed_nbytes = worker, counted, uncompressed_nbytes
        self._warm_up = WarmUp()
        self._first_step, self._clock = worker.iteration, worker.clock
        self._began, self._joining = time.perf_counter(), dict[str, float]()
        self._before = dict[str, float]()
        """The sums before the first step."""
        self._ends: list[int] = []
        """After how many steps each of the first exchanges has been answered."""
        self._after: list[tuple[int, dict[str, float]]] = []
        """Those steps, and the sums as they were then."""
        self._newest = 0
        """After how many steps the newest exchange began."""

    def begin(self) -> None:
        """Says that the worker has joined: the first step to be counted is the next."""
        self._first_step, self._clock = self._worker.iteration, self._worker.clock
        self._began = time.perf_counter()
        self._joining = {name: value for name, value in self._counted().items() if name.endswith("_seconds")}
        self._before = self.traffic()

    def pass_over(self, steps: int) -> None:
        """Leaves out steps that the worker was carried past, with a state of other steps."""
        self._first_step += steps

    def note_step(self) -> None:
        """Notes what the first steps and exchanges cost, in which everything starts; called after every step."""
        taken = self._worker.iteration - self._first_step
        if not self._warm_up.over:
            self._warm_up.note(taken, self._sums())
        if self._worker.clock != self._clock:
            self._clock, self._newest = self._worker.clock, taken
            if len(self._ends) < WARM_UP_EXCHANGES:
                self._ends.append(taken + self._worker.delay + 1)  # the answer is taken in the step after those
        if len(self._after) < len(self._ends) and taken >= self._ends[len(self._after)]:
            self._after.append((taken, self._sums()))

    def traffic(self) -> dict[str, float]:
        """See `DistributedOptimizer.traffic`."""
        counted = self._counted()
        # Whoever joined first has waited for the others, which is no part of the training.
        return {**counted, **{name: counted[name] - seconds for name, seconds in self._joining.items()}}

    def totals(self) -> dict[str, Any]:
        """Returns what all steps so far have sent and received, and what they would have uncompressed."""
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
        # Means need an exchange, of which another one has to be left.
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
        """Returns the sums and the seconds since the worker has joined."""
        counted = {name: value - self._before.get(name, 0) for name, value in self.traffic().items()}
        return {**counted, "seconds": time.perf_counter() - self._began}


def sent_and_received(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of a `CollectiveDriver` by the names that a worker's have: push is sent, pull received."""
    return {
        **{f"{name}_seconds": sums.get(f"{name}_seconds", 0.0) for name in ("encode", "decode", "wait")},
        **{f"{name}_bytes_push": sums.get(f"{name}_bytes", 0) for name in ("payload", "wire")},
        **{f"{name}_bytes_pull": sums.get(f"{name}_bytes_received", 0) for name in ("payload", "wire")},
    }
