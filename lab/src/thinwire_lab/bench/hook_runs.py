"""One measured run of a DDP hook or another method: its ranks, its link, and its figures.

Ranks join and warm up over unlimited links: uncompressed steps of a large model take half a minute at 10 Mbit/s, and
PowerSGD begins with two. Then the links become thin and the clock starts. Bytes are the kernel's counts at each rank's
link. The figures are a rank's median step, its CPU time beside that of the same steps without any exchange, and the
curve of test accuracy over seconds of training without evaluations. Local updates exchange once in a period of steps,
so their median is over the periods' means. A run that stops early or fails keeps its curve.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

from msgspec import UNSET

from thinwire.engines.events import Event, Listening
from thinwire.errors import EngineError, ThinwireError
from thinwire_lab.bench.cells import SILENCE_S, Ended, HookCell, HookRank, Scored, Stepped, Stopped, Warm, rank_command
from thinwire_lab.bench.courses import Course
from thinwire_lab.bench.courses import course as course_of
from thinwire_lab.bench.harness import Figures, Tell
from thinwire_lab.bench.names import hook
from thinwire_lab.bench.rank_group import RankGroup
from thinwire_lab.engines.namespaces import available
from thinwire_lab.engines.starters import Starter
from thinwire_lab.jobs.cluster import SERVER, Links, choose_links
from thinwire_lab.jobs.outcome import CurvePoint
from thinwire_lab.workloads.data import data

RankCommand = Callable[[HookRank], list[str]]


class HookRun(Figures, frozen=True, kw_only=True):
    """The figures of one run; None if not measured, or not reached.

    Attributes:
        seconds_per_step: median over rank 0's steps; with local updates over the means of whole periods.
        compute_share: share of the steps' time without exchanges, 0 … 1; of local updates alone.
        sent_bytes_per_step: mean over ranks of the kernel's counts.
        ended: `steps`, `target` (reached), `limit` (stopped early) or `error`.
        lr: the largest learning rate, if chosen from a grid.
    """

    seconds_per_step: float | None = None
    seconds_per_step_mean: float | None = None
    cpu_seconds_per_step: float | None = None
    cpu_seconds_alone: float | None = None
    compute_share: float | None = None
    sent_bytes_per_step: float | None = None
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


def measure(
    cell: HookCell,
    *,
    limit_s: float | None = None,
    tell: Tell = lambda text: None,
    command: RankCommand = rank_command,
    counted: bool = False,
    course: Course | None = None,
    starter: Starter | None = None,
) -> HookRun:
    """Measures one run. A run that fails keeps its figures so far and its `error`."""
    data(cell.data)
    run = _Run(cell, tell)
    try:
        kernel = cell.link is not None or course is not None or (counted and available()[0])
        course = course or course_of(cell.link, limit_s, hook(cell.hook).period)
        links = choose_links(str(course.rate(0.0, ()) or "none"), "kernel" if kernel else "auto")
        run.collect(links, course, command, starter)
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
    """The events of one run's ranks so far, and the bytes sent since the clock started."""

    def __init__(self, cell: HookCell, tell: Tell) -> None:
        self.cell, self.tell = cell, tell
        self.elapsed: list[float] = []
        self.curve: list[CurvePoint] = []
        self.ended: list[Ended] = []
        self.sent_nbytes: int | None = None

    def collect(self, links: Links, course: Course, command: RankCommand, starter: Starter | None) -> None:
        """Starts the ranks, opens their gates, and collects their events until they end or the course does."""
        ranks, served = range(self.cell.ranks), hook(self.cell.hook).served
        hosts = [f"host {number}" for number in range(self.cell.hosts)] if links.shaping == "kernel" else []
        kinds: list[type[Event]] = [Warm, Stepped, Scored, Stopped, Ended, Listening]
        with RankGroup(kinds, hosts=hosts, also=[SERVER] if served else [], starter=starter) as group:
            server = group.start_server() if served else None
            group.start([HookRank(cell=self.cell, rank=rank, server=server, **group.where) for rank in ranks], command)
            self._follow(group, course)

    def _follow(self, group: RankGroup, course: Course) -> None:
        waiting, timed, began = 0, False, 0.0
        heard = time.monotonic()
        while group.engine.running:
            came = group.engine.poll(course.poll_s if timed and course.poll_s is not None else SILENCE_S)
            now = time.monotonic()
            if came is not None:
                heard = now
                self._take(came[1], group)
                waiting += isinstance(came[1], (Warm, Stopped))
            elif now - heard >= SILENCE_S:
                raise EngineError(f"no rank has reported anything for {SILENCE_S:g} s")
            if waiting == self.cell.ranks:
                waiting, timed = 0, not timed
                if timed:
                    began = now
                    group.begin(course.rate(0.0, ()))
                else:
                    self.sent_nbytes = group.end()
            elif timed:
                wanted = course.rate(now - began, self.elapsed)
                if wanted is None:
                    self.sent_nbytes = group.sent()
                    return
                group.make_thin(wanted)

    def _take(self, event: Event, group: RankGroup) -> None:
        match event:
            case Stepped(step=step, seconds=seconds):
                self.elapsed.append(seconds)
                score = f", {self.curve[-1].text()}" if self.curve else ""
                self.tell(f"step {step} of {self.cell.steps}, {seconds:.1f} s of training{score}")
            case Scored(step=step, seconds=seconds, accuracy=accuracy, loss=loss):
                nbytes = None if loss is UNSET else group.sent()
                sent = UNSET if nbytes is None else nbytes / self.cell.ranks
                point = CurvePoint(step=step, seconds=seconds, accuracy=accuracy, loss=loss, sent_bytes=sent)
                self.curve.append(point)
            case Ended():
                self.ended.append(event)

    def figures(self, links: Links) -> HookRun:
        """Returns the figures of the run."""
        cell, elapsed, curve, ended = self.cell, self.elapsed, self.curve, self.ended
        if len({each.weights for each in ended}) > 1:
            raise EngineError(f"{cell.hook}: the ranks ended with different models")
        period = hook(cell.hook).period
        # Only one step of a period exchanges: a median over single steps would leave out all exchanges.
        ends = [0.0, *elapsed][::period] if len(elapsed) >= period else [0.0, elapsed[-1]]
        means = [(after - before) / min(period, len(elapsed)) for before, after in pairwise(ends)]
        share = 1 / (len(elapsed) * cell.ranks)
        target = next((point for point in curve if cell.target is not None and point.accuracy >= cell.target), None)
        whole = len(ended) == cell.ranks
        spent = [each.exchange_seconds for each in ended if each.exchange_seconds is not None]
        return HookRun(
            seconds_per_step=statistics.median(means),
            seconds_per_step_mean=elapsed[-1] / len(elapsed),
            cpu_seconds_per_step=sum(each.cpu_seconds for each in ended) * share if whole else None,
            cpu_seconds_alone=statistics.fmean(each.cpu_seconds_alone for each in ended) if whole else None,
            compute_share=1 - statistics.fmean(spent) / elapsed[-1] if whole and spent else None,
            sent_bytes_per_step=None if self.sent_nbytes is None else share * self.sent_nbytes,
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
