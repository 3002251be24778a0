"""Workers as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.transports.base import Connection
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome
from thinwire_lab.jobs.training import run_worker


def run_workers(
    job: Job, connect: Callable[[], Sequence[str | Connection]], own: Callable[[int], dict[str, Any]]
) -> list[WorkerOutcome | BaseException]:
    """Trains, with each worker's own arguments of `run_worker`; returns each one's outcome, or its error."""
    results: list[Any] = [None] * job.workers
    # torch has one random generator in a process, and models are built with it: worker 0, which sends the
    # initial weights, builds its model before other threads use the generator.
    built = threading.Event()

    def servers() -> Sequence[str | Connection]:
        built.set()
        return connect()

    def work(rank: int) -> None:
        try:
            if rank:
                built.wait()
            results[rank] = run_worker(job, rank=rank, servers=servers, **own(rank))
        except BaseException as error:
            results[rank] = error
            built.set()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(job.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
