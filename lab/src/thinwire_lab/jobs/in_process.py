"""One run in one process: threads for workers, and servers behind the in-memory transport.

For accuracies alone. The weights are those of a run with processes, bit for bit, for messages and cores are the same;
seconds and bytes on a link are not to be had. What is saved is the work that five processes make for each other. Only
one worker computes at a time, until it has to wait for a message: threads that take the interpreter from each other
cost twice as much. Several comparisons beside each other use several cores.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
from torch import nn

from thinwire.engines.events import Event
from thinwire.engines.roles import OnEvent
from thinwire.errors import ConfigError, DeadlineError, EngineError, ThinwireError
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection
from thinwire.transports.links import parse_rate
from thinwire.transports.memory import MemoryServer
from thinwire_lab.jobs.events import Accuracy
from thinwire_lab.jobs.history import HistoryRecorder
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import CurvePoint, RunOutcome, WorkerOutcome, summarise
from thinwire_lab.jobs.training import run_worker
from thinwire_lab.jobs.training_loop import OnStep


def run(
    job: Job,
    *,
    on_event: OnEvent = lambda process, event: None,
    history: HistoryRecorder | None = None,
    on_step: OnStep | None = None,
) -> RunOutcome:
    """Trains once; the outcome is marked as `in_process`, and its `shaping` is `none`. Workers' threads call back."""
    rate = parse_rate(job.link or "none")
    if rate.bps is not None or job.seconds is not None:
        raise ConfigError("a run in one process has neither a link nor a time budget: its seconds say nothing")
    servers = [MemoryServer(serving(ServerCore())) for _ in range(job.shards)]
    curve: list[CurvePoint] = []
    # Held from the beginning, it also keeps apart those who build their models, from torch's one generator.
    turn = threading.Lock()

    def stepped(rank: int, step: int, loss: float, model: nn.Module) -> None:
        if history is not None:
            history.loss(step, loss)
        if on_step is not None:
            on_step(rank, step, loss, model)

    def work(rank: int) -> WorkerOutcome:
        def report(event: Event) -> None:
            if isinstance(event, Accuracy):
                curve.append(event.point())
            on_event(f"worker {rank}", event)

        with turn:
            return run_worker(
                job,
                rank=rank,
                servers=lambda: [_InTurn(server.connect(), turn) for server in servers],
                report=report,
                metrics=() if history is None else (history,),
                on_step=stepped,
            )

    with ThreadPoolExecutor(job.workers, thread_name_prefix="worker") as pool:
        running = [pool.submit(work, rank) for rank in range(job.workers)]
        try:
            workers = [each.result() for each in running]
        except ThinwireError as error:
            raise EngineError(f"a worker failed: {error}") from error
        finally:
            for server in servers:  # ends the waiting of workers whose peer failed, and after Ctrl-C
                server.stop(grace_s=0)
    return msgspec.structs.replace(summarise(job, workers, curve, rate=rate, shaping="none"), in_process=True)


class _InTurn(Connection):
    """A connection whose owner lets others compute while it waits."""

    def __init__(self, inner: Connection, turn: threading.Lock) -> None:
        self._inner, self._turn = inner, turn
        self.address = inner.address

    def send(self, packet: bytes) -> None:
        self._inner.send(packet)
        self.bytes_sent = self._inner.bytes_sent

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        try:
            packet = self._inner.receive(0)
        except DeadlineError:
            if timeout_s == 0:
                raise
            packet = self._wait(timeout_s)
        self.bytes_received = self._inner.bytes_received
        return packet

    def close(self, timeout_s: float = 30.0) -> None:
        self._inner.close(timeout_s)

    def abort(self) -> None:
        self._inner.abort()

    def _wait(self, timeout_s: float | None) -> bytes | None:
        self._turn.release()
        try:
            return self._inner.receive(timeout_s)
        finally:
            self._turn.acquire()
