"""One run in one process with a computed clock: many workers on few cores, in the time that a cluster would take.

The weights are those of a run with processes, bit for bit, for less work; cores, codecs and bytes are real. A step's
time has two parts: the measured processor seconds of every worker and server, each with a separate processor, and the
computed time of every message on links of a given rate. The worker with the earliest clock runs next, so all events
happen in the order of computed time. The seconds are no measurement: with a link the `shaping` is `modelled`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from thinwire.engines.events import Event
from thinwire.engines.roles import OnEvent
from thinwire.errors import ConfigError, DeadlineError, EngineError, ThinwireError, TransportError
from thinwire.planner.transport_costs import TransportCosts
from thinwire.runtime.clock import Cancel
from thinwire.runtime.metrics import MetricsWriter
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection, wire_nbytes
from thinwire.transports.links import burst_nbytes, parse_rate
from thinwire.transports.memory import MemoryServer
from thinwire_lab.jobs.events import Accuracy
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import CurvePoint, RunOutcome, WorkerOutcome, summarise
from thinwire_lab.jobs.training import run_worker
from thinwire_lab.jobs.training_loop import OnStep
from thinwire_lab.jobs.virtual_time import Agenda, ModelledLinks

MODELLED = "modelled"
"""The `shaping` of a run with computed seconds."""


def run(
    job: Job,
    *,
    on_event: OnEvent = lambda process, event: None,
    metrics: Sequence[MetricsWriter] = (),
    on_step: OnStep | None = None,
) -> RunOutcome:
    """Trains once; the outcome has `in_process` set. Workers' threads make the callbacks, and share the `metrics`."""
    linked = parse_rate(job.link or "none").bps is not None
    if job.seconds is not None:
        raise ConfigError("a run in one process needs a number of steps, not a time budget")
    if linked and job.device != "cpu":
        raise ConfigError(f"device {job.device!r}: the computed clock counts a processor's seconds; use cpu")
    return _Cluster(job, on_event, metrics, on_step).run(shaping=MODELLED if linked else "none")


class _Cluster:
    """The workers' threads and the servers.

    Exactly one thread computes at a time: the caller of `run`, which runs due events and the servers, or one worker,
    until that worker waits for a message.
    """

    def __init__(self, job: Job, on_event: OnEvent, metrics: Sequence[MetricsWriter], on_step: OnStep | None) -> None:
        self.job, self.metrics, self.on_step = job, metrics, on_step
        self.costs, self.agenda = TransportCosts(), Agenda()
        self.rate = parse_rate(job.link or "none")
        burst_bytes = 0.0 if self.rate.bps is None else burst_nbytes(self.rate.bps)
        self.links = ModelledLinks(self.agenda, self.rate.bps, latency_s=self.costs.latency_s, burst_bytes=burst_bytes)
        self.curve: list[CurvePoint] = []
        self.shards = [_Shard(self, index) for index in range(job.shards)]
        self.workers = [_Worker(self, rank, on_event) for rank in range(job.workers)]
        self.yielded = threading.Semaphore(0)

    def run(self, shaping: str) -> RunOutcome:
        """Runs until every worker has ended; returns the outcome."""
        for worker in self.workers:
            worker.thread.start()
        try:
            while any(worker.outcome is None for worker in self.workers):
                self._run_next()
        finally:
            self._end()
        workers = [worker.outcome for worker in self.workers if worker.outcome is not None]
        outcome = summarise(self.job, workers, self.curve, rate=self.rate, shaping=shaping)
        return msgspec.structs.replace(outcome, in_process=True)

    def send(self, sender: str, receiver: str, nbytes: int, ready_s: float, arrived: Callable[[float], None]) -> None:
        """Sends a message over the links once it is ready."""
        self.agenda.note(ready_s, lambda now_s: self.links.send(sender, receiver, nbytes, now_s, arrived))

    def _run_next(self) -> None:
        ready = [worker for worker in self.workers if worker.ready]
        first = min(ready, key=lambda worker: worker.clock_s, default=None)
        if first is not None and first.clock_s < self.agenda.next_s:
            first.compute()
            if isinstance(first.error, ThinwireError):
                raise EngineError(f"a worker failed: {first.error}") from first.error
            if first.error is not None:
                raise first.error
        elif self.agenda.next_s < float("inf"):
            self.agenda.advance()
        else:
            waiting = [worker.name for worker in self.workers if worker.outcome is None]
            raise EngineError(f"{', '.join(waiting)}: waiting for messages, and no process will send one")

    def _end(self) -> None:
        for shard in self.shards:
            shard.server.stop(grace_s=0)
        for worker in self.workers:
            worker.stop()


class _Worker:
    """One worker's thread and clock; it is ready unless it waits for a message or has ended."""

    def __init__(self, cluster: _Cluster, rank: int, on_event: OnEvent) -> None:
        self.name, self._cluster, self._rank, self._on_event = f"worker {rank}", cluster, rank, on_event
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.outcome: WorkerOutcome | None = None
        self.error: BaseException | None = None
        self.ready = True
        self.stopped = False
        self._turn = threading.Semaphore(0)
        self.clock_s = self._began_cpu_s = 0.0

    def now(self) -> float:
        """Returns the clock: the time at its last turn and the seconds computed since. For the worker's thread."""
        return self.clock_s + time.thread_time() - self._began_cpu_s

    def compute(self) -> None:
        """Lets the worker compute until it waits or ends. For the cluster's thread."""
        self._turn.release()
        self._cluster.yielded.acquire()

    def wake(self, now_s: float) -> None:
        """Makes the worker ready: a message has arrived."""
        if not self.ready and self.outcome is None:
            self.clock_s = max(self.clock_s, now_s)
            self.ready = True

    def wait(self, *, until_woken: bool) -> None:
        """Stops computing until `wake`, or only until all earlier events have happened."""
        self._pause(ready=not until_woken)
        self._cluster.yielded.release()
        self._turn.acquire()
        self._resume()

    def stop(self) -> None:
        """Ends the worker's thread."""
        self.stopped = True
        while self.thread.is_alive():
            self._turn.release()
            self.thread.join(0.01)

    def connect(self) -> list[_ModelledConnection]:
        """Connects to every shard."""
        return [shard.connect(self) for shard in self._cluster.shards]

    def _run(self) -> None:
        self._turn.acquire()
        if self.stopped:  # before its first turn: another worker failed, or Ctrl-C ended the run
            return
        self._resume()
        try:
            self.outcome = run_worker(
                self._cluster.job,
                rank=self._rank,
                servers=self.connect,
                report=self._report,
                metrics=self._cluster.metrics,
                on_step=self._cluster.on_step,
                now=self.now,
            )
        except BaseException as error:  # the cluster's thread raises it
            self.error = error
        self._pause(ready=False)
        self._cluster.yielded.release()

    def _report(self, event: Event) -> None:
        if isinstance(event, Accuracy):
            self._cluster.curve.append(event.point())
        self._on_event(self.name, event)

    def _pause(self, *, ready: bool) -> None:
        self.clock_s = self.now()
        self.ready = ready

    def _resume(self) -> None:
        self._began_cpu_s = time.thread_time()
        if self.stopped:
            raise TransportError("the run has ended")


class _Shard:
    """One server on the memory transport; messages reach it at their computed time."""

    def __init__(self, cluster: _Cluster, index: int) -> None:
        self._cluster = cluster
        self.node = f"{'worker' if cluster.job.servers_on_workers else 'server'} {index}"
        self.server = MemoryServer(serving(ServerCore(), clock=self))
        self._connections: list[_ModelledConnection] = []
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._free_s = 0.0

    def connect(self, worker: _Worker) -> _ModelledConnection:
        """Begins a worker's session."""
        connection = _ModelledConnection(self._cluster, worker, self, self.server.connect())
        self._connections.append(connection)
        return connection

    def handle(self, call: Callable[[], None], nbytes: int, now_s: float) -> None:
        """Passes a message to the server, once it is free and has taken all earlier messages, and sends the answers."""
        self._waiting.append((call, nbytes))
        if len(self._waiting) == 1:
            self._take(now_s)

    def _take(self, now_s: float) -> None:
        if self._free_s > now_s:
            self._cluster.agenda.note(self._free_s, self._take)
            return
        call, nbytes = self._waiting[0]
        began_s = time.thread_time()
        call()
        self.work(now_s, time.thread_time() - began_s + self._message_s(nbytes))
        for connection in self._connections:
            connection.answered()
        self._waiting.popleft()
        if self._waiting:
            self._take(now_s)

    def now(self) -> float:
        """Returns the computed time; the server's clock (`runtime.clock.Clock`)."""
        return self._cluster.agenda.now()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancel:
        """Calls the server back after a delay, and sends its messages."""

        def call() -> None:
            callback()
            for connection in self._connections:
                connection.answered()

        return self._cluster.agenda.call_later(delay_s, call)

    def send(self, worker: str, nbytes: int, arrived: Callable[[float], None]) -> None:
        """Sends a message once the server is free."""
        free_s = self.work(self._free_s, self._message_s(nbytes))
        self._cluster.send(self.node, worker, nbytes, free_s, arrived)

    def work(self, begin_s: float, seconds: float) -> float:
        """Keeps the server busy; returns when it is free again."""
        self._free_s = begin_s + seconds
        return self._free_s

    def _message_s(self, nbytes: int) -> float:
        return self._cluster.costs.server_message_s + nbytes * self._cluster.costs.byte_s


class _ModelledConnection(Connection):
    """A worker's session with a shard; a message arrives when the links have carried it."""

    def __init__(self, cluster: _Cluster, worker: _Worker, shard: _Shard, inner: Connection) -> None:
        self._cluster, self._worker, self._shard, self._inner = cluster, worker, shard, inner
        self._arrived: deque[bytes | None] = deque()
        self._over = False
        self.address = inner.address

    def send(self, packet: bytes) -> None:
        self.bytes_sent += wire_nbytes(packet)
        self._leave(partial(self._inner.send, packet), wire_nbytes(packet))

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        if timeout_s == 0 and not self._arrived:
            self._worker.wait(until_woken=False)
            if not self._arrived:
                raise DeadlineError(f"no message from {self.address}")
        while not self._arrived:
            self._worker.wait(until_woken=True)
        packet = self._arrived.popleft()
        if packet is not None:
            self.bytes_received += wire_nbytes(packet)
        return packet

    def close(self, timeout_s: float = 30.0) -> None:
        self._leave(self._inner.close, 0)

    def abort(self) -> None:
        self._leave(self._inner.abort, 0)

    def answered(self) -> None:
        """Sends the server's messages of this session to the worker. For the cluster's thread."""
        while not self._over:
            try:
                packet = self._inner.receive(0)
            except DeadlineError:
                return
            except TransportError:  # the worker has left
                packet = None
            self._over = packet is None
            nbytes = 0 if packet is None else wire_nbytes(packet)
            self._shard.send(self._worker.name, nbytes, partial(self._arrive, packet))

    def _leave(self, call: Callable[[], None], nbytes: int) -> None:
        now_s = self._worker.now()
        handle = partial(self._shard.handle, call, nbytes)
        self._cluster.send(self._worker.name, self._shard.node, nbytes, now_s, handle)

    def _arrive(self, packet: bytes | None, now_s: float) -> None:
        self._arrived.append(packet)
        self._worker.wake(now_s)
