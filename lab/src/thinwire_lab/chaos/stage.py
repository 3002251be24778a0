"""One training of real processes, and what can be done to them while it runs.

A `Stage` starts a server and workers, each behind its own link where the kernel shapes it, and reads what they print
and the server's journal. It kills, freezes and cuts off on request. Everything ends with it.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from thinwire.engines.events import Event, Listening, Lost, Said
from thinwire.engines.roles import own_command
from thinwire.errors import EngineError
from thinwire.runtime.journal import Changed
from thinwire.transports.links import Rate
from thinwire_lab.chaos import stranger
from thinwire_lab.chaos.audit import Audit
from thinwire_lab.chaos.disk import TinyDisk
from thinwire_lab.chaos.faults import Fault
from thinwire_lab.chaos.journals import JournalReader
from thinwire_lab.chaos.outcome import Sample
from thinwire_lab.chaos.witnesses import Witnesses
from thinwire_lab.engines.local import PORT, LocalEngine, free_port
from thinwire_lab.engines.namespaces import Fabric
from thinwire_lab.engines.starters import Starter
from thinwire_lab.jobs.cluster import Links
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
SAMPLE_S = 10.0  # between two looks at the server
DISK_NBYTES = 8 * 2**20
THROTTLE_S = 0.6  # a turn of a worker that computes for a third of it


class Stuck(EngineError):
    """A training makes no progress, or cannot."""


class Stage:
    """One training."""

    def __init__(
        self,
        job: Job,
        links: Links,
        *,
        elastic: Elastic = FIXED,
        checkpoint_every: int | None = None,
        tiny_disk: bool = False,
        starter: Starter | None = None,
    ) -> None:
        self.job, self._links = job, links
        self.audit = Audit()  # of the server's journal so far
        self.problems: list[str] = []  # processes that ended badly without having been told to
        self.done: dict[int, WorkerOutcome] = {}  # outcomes of workers that reached the end
        self.seen = Witnesses()  # who was struck, and what came of it
        self.happened: list[Fault] = []  # faults so far, as they struck
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.samples: list[Sample] = []  # of the server's process
        self._expected: dict[str, Callable[[], None] | None] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._strangers = 0
        self._last_update = time.time()
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-chaos-")))
            self._journal = JournalReader(self.folder / "journal.jsonl")
            self.fabric: Fabric | None = None
            if links.shaping == "kernel":
                hosts = [SERVER, *map(_name, range(job.workers)), "stranger"]
                self.fabric = stack.enter_context(Fabric(dict.fromkeys(hosts, links.rate)))
            self._disk: TinyDisk | None = None
            if tiny_disk:
                (self.folder / "disk").mkdir()
                self._disk = stack.enter_context(closing(TinyDisk(self.folder / "disk", DISK_NBYTES)))
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
            self._stack = stack.pop_all()

    # ---- processes

    @property
    def workers(self) -> set[int]:
        return {rank for rank in range(self.job.workers) if _name(rank) in self.engine.running}

    def start_server(self, *, resume: bool = False) -> None:
        """Starts the server, or the same again from its checkpoint."""
        folder = "disk" if self._disk else "."
        arguments = ["server", "--listen", f"{self.host}:{self.port}", "--journal", str(self.folder / "journal.jsonl")]
        arguments += [*self._server_options, *self._kept(Path(folder) / "server.checkpoint")]
        self._served = self._sampled = time.time()
        self.samples.clear()
        self._start(SERVER, [*arguments, "--resume"] if resume else arguments)

    def start_worker(self, rank: int) -> None:
        arguments = worker_arguments(self.job, rank, [f"{self.host}:{self.port}"])
        arguments += ["--connect-timeout", str(PATIENCE_S), "--reconnect-s", str(PATIENCE_S)]
        self._start(_name(rank), [*arguments, *self._kept(Path(f"worker-{rank}.checkpoint"))])

    def kill_worker(self, rank: int, *, again: bool = True) -> None:
        """Kills a worker; `again` starts the same command as soon as it is dead."""
        self.seen.strike(rank, time.time(), dies=True, for_good=not again)
        if not again:
            self._expected[SERVER] = None  # it may end with an error, for it waits in vain for this worker
        self._expected[_name(rank)] = (lambda: self.start_worker(rank)) if again else None
        self.engine.signal(_name(rank), signal.SIGKILL)

    def kill_server(self) -> None:
        """Kills the server and starts it again with `--resume`."""
        for rank in self.workers:
            self.seen.strike(rank, time.time())
        self._expected[SERVER] = lambda: self.start_server(resume=True)
        self.engine.signal(SERVER, signal.SIGKILL)

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        argv = own_command(*arguments, "--events")
        if self._links.shaping == "application":
            argv += ["--shape", str(self._links.rate)]
        if self.fabric is not None:
            argv += ["--insecure"]  # nobody else has a link to these namespaces
        disk = [self._disk.namespace] if self._disk is not None and name == SERVER else []
        self.engine.start(name, argv, host=name if self.fabric else None, namespaces=disk, optional=True)

    def _kept(self, path: Path) -> list[str]:
        if self._every is None:
            return []
        return ["--checkpoint", str(self.folder / path), "--checkpoint-every", str(self._every)]

    # ---- faults

    def strike(self, fault: Fault) -> bool:
        """Lets a fault happen; False where it cannot: its worker has not come back from an earlier one."""
        rank, name = fault.rank, _name(fault.rank)
        if fault.kind == "garbage":
            self._call(fault)
        elif fault.kind == "disk":
            self._fill(fault)
        elif fault.kind == "server":
            resumable = self._every is not None and self.audit.version > self._every
            if self.seen.waiting or SERVER not in self.engine.running or not resumable:
                return False
            self.kill_server()
        elif rank in self.seen.waiting or rank not in self.workers:
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
        """Freezes a worker for two thirds of each turn, until then."""
        if time.time() + THROTTLE_S < until and name in self.engine.running:
            self.engine.signal(name, signal.SIGSTOP)
            self._later.append((time.time() + THROTTLE_S * 2 / 3, lambda: self.engine.signal(name, signal.SIGCONT)))
            self._later.append((time.time() + THROTTLE_S, lambda: self._throttle(name, until)))

    def _disturb_link(self, fabric: Fabric, fault: Fault) -> None:
        name, rate = _name(fault.rank), self._links.rate
        if fault.kind == "slow":
            fabric.set_rate(name, Rate(max(1000, (rate.bps or 10**9) // 10)))
        else:
            fabric.cut(name, "out" if fault.kind == "cut-out" else "in" if fault.kind == "cut-in" else "both")
        self._until_later(fault.rank, fault.seconds, lambda: fabric.set_rate(name, rate))

    def _call(self, fault: Fault) -> None:
        self._strangers += 1
        kind = stranger.KINDS[fault.rank % len(stranger.KINDS)]
        argv = [sys.executable, "-I", "-S", stranger.__file__, self.host, str(self.port), kind]
        host = "stranger" if self.fabric else None
        name = f"stranger {self._strangers}"
        self.engine.start(name, [*argv, str(fault.round)], host=host, optional=True)

    def _fill(self, fault: Fault) -> None:
        assert self._disk is not None
        self._disk.fill()
        self._later.append((time.time() + fault.seconds, self._disk.clear))

    def _until_later(self, rank: int, seconds: float, lift: Callable[[], None]) -> None:
        def lift_now() -> None:
            lift()
            self.seen.lift(rank, time.time())

        self.seen.strike(rank, time.time(), lasts=True)
        self._later.append((time.time() + seconds, lift_now))

    # ---- what goes on

    def until(self, holds: Callable[[], bool]) -> None:
        """Follows the training until something holds."""
        while not holds():
            self.poll()
            if self.problems:
                raise Stuck(f"given up at step {self.audit.version}")
            silence_s = SILENCE_S if self.audit.version > 0 else BEGIN_S
            if time.time() - self._last_update > silence_s:
                raise Stuck(f"no update for {silence_s:g} s, at step {self.audit.version}")

    def poll(self) -> None:
        """Takes what has been reported and written meanwhile, and lifts faults whose time is over."""
        came = self.engine.poll(POLL_S)
        while came is not None:
            self._take(*came)
            came = self.engine.poll(0)
        for entry in self._journal.entries():
            version = self.audit.version
            self.audit.add(entry)
            if self.audit.version != version:
                self._last_update = entry.at
            self.seen.read(entry)
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
        """Looks at the server's process, if there is one; one that is just ending has nothing to look at."""
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
            case Lost(reason=reason) if not name.startswith("stranger"):
                self.problems.append(f"{name} {reason}")
            case Done(outcome=outcome):
                self.done[outcome.rank] = outcome
            case Said(text=text):
                self.lines.append(f"{name}: {text}")
                if name.startswith("worker"):
                    self.seen.hear(int(name.split()[1]), text, time.time())

    def until_step(self, step: int) -> None:
        self.until(lambda: self.audit.version >= step or bool(self.done))

    def until_back(self) -> None:
        """Follows the training until all workers take part again, or its end."""
        self.until(lambda: not self.seen.waiting or bool(self.done))

    def finish(self, limit_s: float = 60.0) -> None:
        """Waits for the end: all workers that run and have not been struck late, and the server."""
        self.until(lambda: not self.workers or bool(self.done and self.workers <= self.seen.waiting.keys()))
        self.poll()
        deadline = time.time() + limit_s
        while (left := SERVER in self.engine.running and not self.workers) and time.time() < deadline:
            self.poll()
        if left:
            self.problems.append(f"the server did not end within {limit_s:g} s after all workers had")

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name(rank: int) -> str:
    return f"worker {rank}"
