"""Sums of bytes and seconds of one worker since the training began, and the report of them.

`hooks/records.py` has the costs of single steps and tables.
"""

from __future__ import annotations

import time

from thinwire.hooks.report import Report
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.rank_shards import RankShards
from thinwire.telemetry import WARM_UP_EXCHANGES, WarmUp
from thinwire.worker.core import Worker


class TrainingCosts:
    """Sums over the steps that a worker takes from `begin` on, and the clock beside them.

    Args:
        worker: counts bytes, values and seconds.
        driver: knows what passed the wire.
        shards: every rank's own, in a group: what this rank serves is counted with what it sends.
    """

    def __init__(self, worker: Worker, driver: WorkerDriver, shards: RankShards | None) -> None:
        self._worker, self._driver, self._shards = worker, driver, shards
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
        counted = self._worker.counters.snapshot()
        self._joining = {name: value for name, value in counted.items() if name.endswith("_seconds")}
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
        sent, received = self._driver.wire_nbytes
        if self._shards is not None:
            sent, received = self._shards.wire_nbytes(self._driver.connections)
        counted = self._worker.counters.snapshot()
        # Whoever joined first has waited for the others, which is no part of the training.
        spent = {name: counted[name] - seconds for name, seconds in self._joining.items()}
        return {**counted, **spent, "wire_bytes_push": sent, "wire_bytes_pull": received}

    def report(self) -> Report:
        """See `DistributedOptimizer.report`."""
        nbytes = sum(tensor.shown.nbytes for tensor in self._worker.model.tensors if not tensor.state)
        if self._shards is not None:  # what a rank sends and serves, as in a ring
            nbytes = 2 * nbytes * (self._shards.workers - 1) // self._shards.workers
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
            uncompressed_nbytes=nbytes,
            void_rounds=int(sums.get("void_rounds", 0)),
            warm_up=warm_up,
            warm_up_s=(sums.get("exchange_seconds", 0) - since.get("exchange_seconds", 0)) / max(1, warm_up),
            compiling=bool(self._ends) and len(apart) < WARM_UP_EXCHANGES,
        )

    def _sums(self) -> dict[str, float]:
        """Returns the sums and the seconds since the worker has joined."""
        counted = {name: value - self._before.get(name, 0) for name, value in self.traffic().items()}
        return {**counted, "seconds": time.perf_counter() - self._began}
