"""One measured run of a DDP hook, or of what trains beside it: its ranks, its link, and what it came to.

Ranks join and warm up over unlimited links (uncompressed steps of a large model take half a minute at 10 Mbit/s, and
PowerSGD begins with two), then the links become thin and the clock starts. Bytes are what the kernel counted at each
rank's link. The figures are a rank's median step, its CPU time beside that of the same steps without any exchange,
and the curve of test accuracy over seconds of training, evaluations left out.

What a run reports on its way is enough for its figures: one that is cut short, or fails, keeps its curve.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from msgspec import UNSET, UnsetType

from thinwire.bench.courses import Course
from thinwire.bench.courses import course as course_of
from thinwire.bench.harness import Figures, Tell
from thinwire.bench.hook_cells import Cell, Ended, HookRank, Scored, hook
from thinwire.bench.rank_events import SILENCE_S, STOPPED, WARM, Gates, Stepped, Stopped, Warm
from thinwire.engines.events import Event
from thinwire.engines.links import Rate
from thinwire.engines.local import LocalEngine, free_port
from thinwire.engines.namespaces import Fabric, available
from thinwire.engines.starters import Starter, own_command
from thinwire.errors import EngineError, ThinwireError
from thinwire.jobs.cluster import SERVER, START_TIMEOUT_S, Links, choose_links
from thinwire.jobs.events import Listening
from thinwire.jobs.outcome import CurvePoint
from thinwire.workloads.data import data

PORT = 29400
RankCommand = Callable[[HookRank], list[str]]


class HookRun(Figures, frozen=True, kw_only=True):
    """What one run came to; None where it was not measured, or the run did not get there.

    Attributes:
        seconds_per_step: median over rank 0's steps.
        cpu_seconds_alone: of the same step without any exchange.
        compute_share: of the steps' time, 0 … 1, what exchanges left for computing; of local updates alone.
        sent_bytes_per_step: mean over ranks, as the kernel counted them.
        seconds: of training, evaluations left out.
        ended: `steps`, `target` (reached), `limit` (cut short) or `error`.
        test_loss: at the end, in nats a byte, of text.
        lr: the largest learning rate, where it was chosen from a grid.
        report: what `ddp.report` says of a hook of ours.
    """

    seconds_per_step: float | None = None
    seconds_per_step_mean: float | None = None
    cpu_seconds_per_step: float | None = None
    cpu_seconds_alone: float | None = None
    compute_share: float | None = None
    sent_bytes_per_step: float | None = None
    received_bytes_per_step: float | None = None
    curve: list[CurvePoint]
    seconds_to_target: float | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    lr: float | None = None
    steps_done: int
    seconds: float
    ended: str
    shaping: str = ""
    report: str = ""
    error: str | None = None


def rank_command(role: HookRank) -> list[str]:
    """Returns the command of a rank's process."""
    return thinwire_command(*role.command())


def thinwire_command(*arguments: str) -> list[str]:
    """Returns the command of a process that reports to us."""
    return own_command(*arguments, "--events")


def measure(
    cell: Cell,
    *,
    limit_s: float | None = None,
    tell: Tell = lambda text: None,
    command: RankCommand = rank_command,
    counted: bool = False,
    authors: Path | None = None,
    course: Course | None = None,
    starter: Starter | None = None,
) -> HookRun:
    """Measures one run. One that fails keeps what it got to, and `error` says how.

    Args:
        cell: what to run.
        limit_s: end the run once it has trained for so many seconds; None lets it go on.
        tell: takes words on progress.
        command: of a rank's process.
        counted: have the kernel make links, and count their bytes, without a limit too, where it may.
        authors: the file of other people's optimizer.
        course: what the links carry while it trains, in place of the cell's rate and of `limit_s`.
        starter: makes the processes; by default each is a program of its own.

    Raises:
        ConfigError, DataError: what no run of this data can do without; nothing was started.
    """
    data(cell.data, root=cell.data_root)
    run = _Run(cell, tell, authors)
    try:
        kernel = cell.link is not None or course is not None or (counted and available()[0])
        course = course or course_of(cell.link, limit_s)
        links = choose_links(str(course.rate(0.0, ()) or "none"), "kernel" if kernel else "auto")
        run.play(links, course, command, starter)
        return run.figures(links)
    except ThinwireError as error:
        return HookRun(
            curve=run.curve,
            steps_done=len(run.elapsed),
            seconds=max(run.elapsed, default=0.0),
            ended="error",
            error=f"{type(error).__name__}: {error}",
        )


class _Run:
    """What the ranks of one run have reported so far, and the bytes counted at the clock's start and end."""

    def __init__(self, cell: Cell, tell: Tell, authors: Path | None) -> None:
        self.cell, self.tell = cell, tell
        self._authors = None if authors is None else str(authors)
        self.fabric: Fabric | None = None
        self._rate = Rate(None)
        self.names = [f"rank {rank}" for rank in range(cell.ranks)]
        self.elapsed: list[float] = []
        self.curve: list[CurvePoint] = []
        self.ended: list[Ended] = []
        self.counts: list[tuple[int, int]] = []

    def play(self, links: Links, course: Course, command: RankCommand, starter: Starter | None) -> None:
        """Starts the ranks, opens their gates, and collects what they report until they end or the course does."""
        names, served = self.names, hook(self.cell.hook).served
        kinds: list[type[Event]] = [Warm, Stepped, Scored, Stopped, Ended, Listening]
        with ExitStack() as stack:
            gate = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            fabric = None
            if links.shaping == "kernel":
                hosts = [*names, SERVER] if served else names
                fabric = self.fabric = stack.enter_context(Fabric(dict.fromkeys(hosts, Rate(None))))
            host = fabric.addresses[names[0]] if fabric else "127.0.0.1"
            master = f"{host}:{PORT if fabric else free_port()}"
            # By the rendezvous ranks find the address that others reach their shards by.
            environment = {"GLOO_SOCKET_IFNAME": "eth0" if fabric else "lo", "MASTER_ADDR": host}
            engine = stack.enter_context(LocalEngine(kinds, fabric=fabric, environment=environment, starter=starter))
            server = None
            if served:
                private = ("--insecure",) if fabric else ()  # nobody else has a link to these namespaces
                serving = thinwire_command("server", "--listen", engine.listen_at(SERVER), *private)
                engine.start(SERVER, serving, host=SERVER if fabric else None)
                server = f"grpc://{engine.wait_for(SERVER, Listening, START_TIMEOUT_S).address}"
            for rank, name in enumerate(names):
                role = HookRank(
                    cell=self.cell, rank=rank, master=master, gate=str(gate), authors=self._authors, server=server
                )
                engine.start(name, command(role), host=name if fabric else None)
            self._follow(engine, course, gate)

    def _follow(self, engine: LocalEngine, course: Course, gate: Path) -> None:
        waiting, opened, began = 0, 0, 0.0
        heard = time.monotonic()
        while engine.running:
            came = engine.poll(SILENCE_S if opened != 1 or course.poll_s is None else course.poll_s)
            now = time.monotonic()
            if came is not None:
                heard = now
                self._take(came[1])
                waiting += isinstance(came[1], (Warm, Stopped))
            elif now - heard >= SILENCE_S:
                raise EngineError(f"no rank has reported anything for {SILENCE_S:g} s")
            if waiting == self.cell.ranks:
                waiting = 0
                if opened == 0:
                    began = now
                    self._make_thin(course.rate(0.0, ()))
                self._count()
                Gates(gate).open(STOPPED if opened else WARM)
                opened += 1
            elif opened == 1:
                wanted = course.rate(now - began, self.elapsed)
                if wanted is None:
                    self._count()
                    return
                self._make_thin(wanted)

    def _make_thin(self, rate: Rate | None) -> None:
        if self.fabric is not None and rate is not None and rate != self._rate:
            self._rate = rate
            self.fabric.set_rates(dict.fromkeys(self.fabric.addresses, rate))

    def _count(self) -> None:
        if self.fabric is not None:
            ways = (self.fabric.sent, self.fabric.received)
            sent, received = (sum(way(name).nbytes for name in self.names) for way in ways)
            self.counts.append((sent, received))

    def _sent_so_far(self) -> float | UnsetType:
        """Bytes that left a rank since the clock started, mean over the ranks."""
        if self.fabric is None or not self.counts:
            return UNSET
        return (sum(self.fabric.sent(name).nbytes for name in self.names) - self.counts[0][0]) / len(self.names)

    def _take(self, event: Event) -> None:
        match event:
            case Stepped(step=step, seconds=seconds):
                self.elapsed.append(seconds)
                score = f", {self.curve[-1].text()}" if self.curve else ""
                self.tell(f"step {step} of {self.cell.steps}, {seconds:.1f} s of training{score}")
            case Scored(step=step, seconds=seconds, accuracy=accuracy, loss=loss):
                sent = UNSET if loss is UNSET else self._sent_so_far()
                point = CurvePoint(step=step, seconds=seconds, accuracy=accuracy, loss=loss, sent_bytes=sent)
                self.curve.append(point)
            case Ended():
                self.ended.append(event)

    def figures(self, links: Links) -> HookRun:
        """Returns what the run came to.

        Raises:
            EngineError: the ranks ended with different models.
        """
        cell, elapsed, curve, counts, ended = self.cell, self.elapsed, self.curve, self.counts, self.ended
        if len({each.weights for each in ended}) > 1:
            raise EngineError(f"{cell.hook}: the ranks ended with different models; no hook here allows that")
        seconds = [after - before for before, after in zip([0.0, *elapsed], elapsed, strict=False)]
        share = 1 / (len(elapsed) * cell.ranks)
        sent = received = None
        if len(counts) == 2:
            sent, received = (share * (after - before) for before, after in zip(*counts, strict=True))
        target = next((point for point in curve if cell.target is not None and point.accuracy >= cell.target), None)
        whole = len(ended) == cell.ranks
        spent = [each.exchange_seconds for each in ended if each.exchange_seconds is not None]
        return HookRun(
            seconds_per_step=statistics.median(seconds),
            seconds_per_step_mean=statistics.fmean(seconds),
            cpu_seconds_per_step=sum(each.cpu_seconds for each in ended) * share if whole else None,
            cpu_seconds_alone=statistics.fmean(each.cpu_seconds_alone for each in ended) if whole else None,
            compute_share=1 - statistics.fmean(spent) / elapsed[-1] if whole and spent else None,
            sent_bytes_per_step=sent,
            received_bytes_per_step=received,
            curve=curve,
            seconds_to_target=target.seconds if target else None,
            test_accuracy=curve[-1].accuracy if curve else None,
            test_loss=curve[-1].loss or None if curve else None,
            steps_done=len(elapsed),
            seconds=elapsed[-1],
            ended="target" if target else "steps" if whole else "limit",
            shaping=links.shaping,
            report=next((each.report for each in ended if each.report), ""),
        )


def last_line(error: str) -> str:
    """What a hook died of, for a table; the ranks' tracebacks before it, a screen or two, are in the file of results.

    >>> last_line("EngineError: rank 1 ended; last lines:\\n    [rank1]: NonFiniteError: w\\nstopped: rank 0")
    '[rank1]: NonFiniteError: w'
    >>> last_line("EngineError: the ranks ended with different models")
    'EngineError: the ranks ended with different models'
    """
    quoted = [line.strip() for line in error.splitlines() if line.startswith("    ")]  # as the engine quotes a process
    return quoted[-1] if quoted else error
