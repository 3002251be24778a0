"""One training of real processes, and the faults that a test causes while it runs.

A `Stage` starts a server and workers, each behind its own link if the kernel shapes it. It reads their output and the
server's journal; it kills, freezes and cuts off processes on request. All processes end with it.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from thinwire.engines.events import Event, Listening, Lost, Said
from thinwire.engines.roles import own_command
from thinwire.errors import EngineError
from thinwire.runtime.journal import Changed
from thinwire.transports.links import Rate
from thinwire_lab.chaos.audit import Audit, JournalReader, Returns
from thinwire_lab.chaos.faults import Fault
from thinwire_lab.engines.local import PORT, LocalEngine, free_port
from thinwire_lab.engines.namespaces import Fabric
from thinwire_lab.engines.starters import Starter
from thinwire_lab.jobs.cluster import Links, Place
from thinwire_lab.jobs.events import KINDS, Done
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome
from thinwire_lab.jobs.processes import FIXED, Elastic, worker_arguments

SERVER = "server"
POLL_S = 0.05
LAST_LINES = 40
BEGIN_S = 900.0  # how long the first update may take: every process has to start
PATIENCE_S = 300.0  # how long a worker tries to reach the server: on a busy machine a process takes a minute to start
SILENCE_S = 300.0  # how long a training may go without an update
SAMPLE_S = 10.0  # between two samples of the server's resources
THROTTLE_S = 0.6  # a turn of a throttled worker, which computes for a third of it


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a server's process, `minute` minutes after its start."""

    minute: float
    rss_mb: float  # resident memory, in MB
    descriptors: int  # open files and sockets
    threads: int  # of the process


class Stage(ExitStack):
    """One training."""

    def __init__(
        self,
        job: Job,
        links: Links,
        *,
        elastic: Elastic = FIXED,
        checkpoint_every: int | None = None,
        starter: Starter | None = None,
    ) -> None:
        super().__init__()
        self.job, self._links = job, links
        self.audit = Audit()  # of the server's journal so far
        self.problems: list[str] = []  # processes that failed without a fault
        self.done: dict[int, WorkerOutcome] = {}  # outcomes of workers that reached the end
        self.returns = Returns()
        self.happened: list[Fault] = []  # the faults so far
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.samples: list[Sample] = []  # of the server's process
        self._expected: dict[str, Callable[[], None] | None] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._last_update = time.time()
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-chaos-")))
            self._journal = JournalReader(self.folder / "journal.jsonl")
            self.fabric: Fabric | None = None
            if links.shaping == "kernel":
                hosts = [SERVER, *map(_name, range(job.workers))]
                self.fabric = stack.enter_context(Fabric(dict.fromkeys(hosts, links.rate)))
            self.engine = stack.enter_context(
                LocalEngine(KINDS, fabric=self.fabric, grace_s=1.0, lines=True, starter=starter)
            )
            self._server_options = elastic.arguments()
            self._every = checkpoint_every
            self.host = self.fabric.addresses[SERVER] if self.fabric else "127.0.0.1"
            self.port = PORT if self.fabric else free_port()
            self.start_server()
            self.engine.wait_for(SERVER, Listening, PATIENCE_S)
            for rank in range(job.workers):
                self.start_worker(rank)
            self.push(stack.pop_all())

    @property
    def workers(self) -> set[int]:
        return {rank for rank in range(self.job.workers) if _name(rank) in self.engine.running}

    def start_server(self, *, resume: bool = False) -> None:
        """Starts the server, with `resume` from its checkpoint."""
        arguments = ["server", "--listen", f"{self.host}:{self.port}", "--journal", str(self.folder / "journal.jsonl")]
        arguments += [*self._server_options, *self._kept("server.checkpoint")]
        self._served = self._sampled = time.time()
        self.samples.clear()
        self._start(SERVER, [*arguments, "--resume"] if resume else arguments)

    def start_worker(self, rank: int) -> None:
        arguments = worker_arguments(self.job, rank, [f"{self.host}:{self.port}"])
        arguments += ["--connect-timeout", str(PATIENCE_S), "--reconnect-s", str(PATIENCE_S)]
        self._start(_name(rank), [*arguments, *self._kept(f"worker-{rank}.checkpoint")])

    def kill_worker(self, rank: int, *, again: bool = True) -> None:
        """Kills a worker; `again` starts the same command after its death."""
        self.returns.strike(rank, time.time(), dies=True, for_good=not again)
        if not again:
            self._expected[SERVER] = None  # it waits for this worker and may end with an error
        self._expected[_name(rank)] = (lambda: self.start_worker(rank)) if again else None
        self.engine.signal(_name(rank), signal.SIGKILL)

    def kill_server(self) -> None:
        """Kills the server and starts it again with `--resume`."""
        for rank in self.workers:
            self.returns.strike(rank, time.time())
        self._expected[SERVER] = lambda: self.start_server(resume=True)
        self.engine.signal(SERVER, signal.SIGKILL)

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        argv = own_command(*arguments, "--events", *Place(links=self._links).arguments(None))
        self.engine.start(name, argv, host=name if self.fabric else None, optional=True)

    def _kept(self, file: str) -> list[str]:
        if self._every is None:
            return []
        return ["--checkpoint", str(self.folder / file), "--checkpoint-every", str(self._every)]

    def strike(self, fault: Fault) -> bool:
        """Causes a fault; returns False if it cannot occur, as while its worker is away after an earlier one."""
        rank, name = fault.rank, _name(fault.rank)
        if fault.kind == "server":
            resumable = self._every is not None and self.audit.version > self._every
            if self.returns.waiting or SERVER not in self.engine.running or not resumable:
                return False
            self.kill_server()
        elif rank in self.returns.waiting or rank not in self.workers:
            return False
        elif fault.kind in ("kill", "gone"):
            self.kill_worker(rank, again=fault.kind == "kill")
        elif fault.kind == "stop":
            self.engine.signal(name, signal.SIGSTOP)
            self._until_later(rank, fault.seconds, lambda: self.engine.signal(name, signal.SIGCONT))
        elif fault.kind == "throttle":
            self._throttle(name, time.time() + fault.seconds)
            self._until_later(rank, fault.seconds, lambda: self.engine.signal(name, signal.SIGCONT))
        elif self.fabric is None:
            return False
        else:
            self._disturb_link(self.fabric, fault)
        self.happened.append(fault)
        return True

    def _throttle(self, name: str, until: float) -> None:
        """Freezes a worker for two thirds of each turn, until that time."""
        if time.time() + THROTTLE_S < until and name in self.engine.running:
            self.engine.signal(name, signal.SIGSTOP)
            self._later.append((time.time() + THROTTLE_S * 2 / 3, lambda: self.engine.signal(name, signal.SIGCONT)))
            self._later.append((time.time() + THROTTLE_S, lambda: self._throttle(name, until)))

    def _disturb_link(self, fabric: Fabric, fault: Fault) -> None:
        name, rate = _name(fault.rank), self._links.rate
        if fault.kind == "slow":
            fabric.set_rates({name: Rate(max(1000, (rate.bps or 10**9) // 10))})
        else:
            fabric.cut(name, "out" if fault.kind == "cut-out" else "in" if fault.kind == "cut-in" else "both")
        self._until_later(fault.rank, fault.seconds, lambda: fabric.set_rates({name: rate}))

    def _until_later(self, rank: int, seconds: float, lift: Callable[[], None]) -> None:
        def lift_now() -> None:
            lift()
            self.returns.lift(rank, time.time())

        self.returns.strike(rank, time.time(), lasts=True)
        self._later.append((time.time() + seconds, lift_now))

    def until(self, holds: Callable[[], bool]) -> None:
        """Follows the training until a condition holds."""
        while not holds():
            self.poll()
            if self.problems:
                raise EngineError(f"given up at step {self.audit.version}")
            silence_s = SILENCE_S if self.audit.version > 0 else BEGIN_S
            if time.time() - self._last_update > silence_s:
                raise EngineError(f"no update for {silence_s:g} s, at step {self.audit.version}")

    def poll(self) -> None:
        """Reads new events and journal entries, and ends faults in time."""
        came = self.engine.poll(POLL_S)
        while came is not None:
            self._take(*came)
            came = self.engine.poll(0)
        for entry in self._journal.entries():
            version = self.audit.version
            self.audit.add(entry)
            if self.audit.version != version:
                self._last_update = entry.at
            self.returns.read(entry)
            if isinstance(entry, Changed):
                self.lines.append(f"server: {entry.reason}")
        now = time.time()
        if now >= self._sampled + SAMPLE_S:
            self._sampled = now
            self._sample((now - self._served) / 60)
        for each in [each for each in self._later if each[0] <= now]:
            self._later.remove(each)
            each[1]()

    def _sample(self, minute: float) -> None:
        """Samples the resources of the server's process, if it runs."""
        with suppress(OSError, KeyError, ValueError):
            process = Path("/proc") / str(self.engine.pids[SERVER])
            status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
            sample = Sample(
                minute=round(minute, 2),
                rss_mb=int(status["VmRSS"].split()[0]) * 1024 / 1e6,
                descriptors=len(list((process / "fd").iterdir())),
                threads=int(status["Threads"]),
            )
            self.samples.append(sample)

    def _take(self, name: str, event: Event) -> None:
        match event:
            case Lost() if name in self._expected:
                if then := self._expected.pop(name):
                    then()
            case Lost(reason=reason):
                self.problems.append(f"{name} {reason}")
            case Done(outcome=outcome):
                self.done[outcome.rank] = outcome
            case Said(text=text):
                self.lines.append(f"{name}: {text}")

    def until_step(self, step: int) -> None:
        self.until(lambda: self.audit.version >= step or bool(self.done))

    def until_back(self) -> None:
        """Follows the training until all workers have returned, or its end."""
        self.until(lambda: not self.returns.waiting or bool(self.done))

    def finish(self, limit_s: float = 60.0) -> None:
        """Waits for the server and for all workers but those that a late fault hit."""
        self.until(lambda: not self.workers or bool(self.done and self.workers <= self.returns.waiting.keys()))
        self.poll()
        deadline = time.time() + limit_s
        while (left := SERVER in self.engine.running and not self.workers) and time.time() < deadline:
            self.poll()
        if left:
            self.problems.append(f"the server did not end within {limit_s:g} s after all workers had")


def _name(rank: int) -> str:
    return f"worker {rank}"
