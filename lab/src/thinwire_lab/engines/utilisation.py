"""Samples of how busy processes, their links and the machine are, taken by a thread while they run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType

from thinwire.planner.utilisation import Sample, sample


class Sampler:
    """Takes samples from a thread of its own until it is left."""

    def __init__(self, pids: Mapping[str, int], *, interval_s: float = 0.25) -> None:
        self.samples: list[Sample] = []  # so far
        self._pids, self._interval_s = dict(pids), interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="utilisation", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self.samples.append(sample(self._pids))
            self._over.wait(self._interval_s)
