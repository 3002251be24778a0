"""One run in one process: threads for workers, and servers behind the in-memory transport.

For accuracies alone. The weights are those of a run with processes, bit for bit, for messages and cores are the same;
seconds and bytes on a link are not to be had. What is saved is the work that five processes make for each other:
two to four times, on a machine with fewer cores than processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from thinwire.engines.links import parse_rate
from thinwire.errors import ConfigError, EngineError, ThinwireError
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.studies.experiment import Links, OnEvent, summarise
from thinwire.studies.job import Job
from thinwire.studies.training import run_worker
from thinwire.transports.base import Connection
from thinwire.transports.memory import MemoryServer


def run(job: Job, *, on_event: OnEvent = lambda process, event: None) -> dict[str, Any]:
    """Trains once and returns the outcome, with the keys of `experiment.run` and `in_process`; `shaping` is `none`.

    Args:
        job: what to train, without a link.
        on_event: hears everything that workers report, each from its thread.

    Raises:
        ConfigError: the job has a link or a time budget, which mean nothing here.
        EngineError: a worker failed.
    """
    rate = parse_rate(job.link or "none")
    if rate.bps is not None or job.seconds is not None:
        raise ConfigError("a run in one process has neither a link nor a time budget: its seconds say nothing")
    servers = [MemoryServer(serving(ServerCore())) for _ in range(job.shards)]
    curve: list[dict[str, float]] = []
    # Models are built from torch's one generator, so one at a time; from its first connection on a worker has its own.
    building = threading.Lock()

    def work(rank: int) -> dict[str, Any]:
        def listen(event: dict[str, Any]) -> None:
            if event.get("event") == "accuracy":
                curve.append({key: event[key] for key in ("step", "seconds", "accuracy")})
            on_event(f"worker {rank}", event)

        building.acquire()
        connecting = _Once(building.release)

        def connect() -> Sequence[str | Connection]:
            connecting()
            return [server.connect() for server in servers]

        try:
            return run_worker(job, rank=rank, servers=connect, report=listen)
        finally:
            connecting()

    with ThreadPoolExecutor(job.workers, thread_name_prefix="worker") as pool:
        running = [pool.submit(work, rank) for rank in range(job.workers)]
        try:
            outcomes = {rank: each.result() for rank, each in enumerate(running)}
        except ThinwireError as error:
            raise EngineError(f"a worker failed: {error}") from error
        finally:
            for server in servers:  # whoever still waits, for the one that failed or because of Ctrl-C, is told
                server.stop(grace_s=0)
    return summarise(job, Links("none", rate), outcomes, curve) | {"in_process": True}


class _Once:
    """Calls a function the first time it is called."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def __call__(self) -> None:
        if self._function is not None:
            function, self._function = self._function, None
            function()
