"""One training of real processes: learners that sleep to keep their paces, a server, thin links, and deaths.

When all learners wait with the shared parameters, the clock and the count of bytes start, and the links become thin.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import msgspec

from thinwire.engines.events import Event, Listening, Restarted
from thinwire.engines.roles import START_TIMEOUT_S, own_command
from thinwire.errors import EngineError
from thinwire.policies.designs import design
from thinwire.runtime.journal import AnyEntry, Updated
from thinwire_lab.bench.cells import SILENCE_S, Warm
from thinwire_lab.bench.decoupled.learner import Inner, Learned, LearnerRank, command
from thinwire_lab.bench.decoupled.learning import ALONE, Learning
from thinwire_lab.bench.harness import Figures, Tell
from thinwire_lab.bench.rank_group import RankGroup
from thinwire_lab.engines.starters import forks
from thinwire_lab.jobs.cluster import SERVER, Links
from thinwire_lab.workloads.texts import CONTEXT

QUIET_END = 0.8
"""No learner dies in the last fifth, so that all learners are back at the end."""


class Run(Figures, frozen=True, kw_only=True):
    """The figures of one training.

    Attributes:
        steps: inner steps of each learner, by rank.
        seconds: seconds until the last inner step.
        goodput: all inner steps, divided by the number that the paces allow until each learner's last one.
        stall: the longest stall of an inner step, beyond its pace and its computing, in inner steps.
        overrun: the share of inner steps with a computing longer than the pace, because the machine was too busy.
        merged: the share of the learners' text that the shared parameters contain.
        gap_s: the longest time without a new version of a table.
        deaths: number of killed learners.
        loss: loss of the shared parameters at the end, in nats a byte.
        carried: bytes that a learner sent and received in an inner step, by the kernel's count.
        below_ddp: the bytes of a rank of plain DDP (`ring_nbytes`, computed), divided by `carried`.
    """

    steps: list[int]
    seconds: float
    goodput: float
    stall: float
    overrun: float
    merged: float | None = None
    gap_s: float | None = None
    deaths: int = 0
    loss: float | None = None
    carried: float | None = None
    below_ddp: float | None = None
    shaping: str = ""


def run(learning: Learning, seconds: float, links: Links, *, kill_every_s: float | None, tell: Tell) -> Run:
    """Trains for a number of seconds; workers in step take as many steps as the slowest of them can take."""
    ranks = range(len(learning.speeds))
    kernel = links.shaping == "kernel"
    hosts = [*(f"host {rank}" for rank in ranks), SERVER] if kernel else []
    local = None if learning.design == ALONE else design(learning.design).local
    waits = local is not None and not local.quorum
    steps = int(seconds * min(learning.speeds) / learning.pace_s) if waits else None
    deaths = int(seconds * QUIET_END / kill_every_s) if kill_every_s else 0
    kinds: list[type[Event]] = [Warm, Inner, Learned, Listening]
    with RankGroup(kinds, hosts=hosts, starter=forks()) as group:
        journal = Path(group.gate) / "journal.jsonl"
        server = None if learning.design == ALONE else _start_server(group, journal)
        for rank in ranks:
            role = LearnerRank(learning=learning, seconds=seconds, steps=steps, rank=rank, server=server, **group.where)
            host = hosts[rank] if hosts else None
            group.engine.start(_name(rank), command(role), host=host, restarts=deaths)
        course = _Course(learning, seconds, group, tell)
        course.follow(links, kill_every_s, deaths)
        if server is not None:
            course.read(journal)
        return course.figures(links)


class _Course:
    """The reports of one training's processes."""

    def __init__(self, learning: Learning, seconds: float, group: RankGroup, tell: Tell) -> None:
        self._learning, self._seconds, self._group, self._tell = learning, seconds, group, tell
        self._inner: dict[str, list[Inner]] = {_name(rank): [] for rank in range(len(learning.speeds))}
        self._learned: dict[str, Learned] = {}
        self._updated: dict[int, list[float]] = defaultdict(list)
        self._nbytes: int | None = None
        self._warm = self._deaths = 0
        self._began = float("inf")

    def follow(self, links: Links, kill_every_s: float | None, deaths: int) -> None:
        """Begins when all learners wait, kills one at regular times, and returns when all have ended."""
        heard = time.monotonic()
        while len(self._learned) < len(self._inner):
            came = self._group.engine.poll(0.1)
            if came is not None:
                heard = time.monotonic()
                self._take(*came)
            elif time.monotonic() > heard + SILENCE_S:
                raise EngineError(f"no report of a learner for {SILENCE_S:g} s")
            if self._warm == len(self._inner) and self._began == float("inf"):
                self._group.begin(links.rate)
                self._began = time.time()
            if kill_every_s and self._deaths < deaths and time.time() > self._began + kill_every_s * (self._deaths + 1):
                self._deaths += 1
                self._group.engine.signal(_name(self._deaths % len(self._inner)), signal.SIGKILL)
        # Each byte has one sender: the sum over learners and server is all that learners sent and received.
        self._nbytes = self._group.sent()

    def read(self, journal: Path) -> None:
        """Reads the times of the tables' new versions."""
        for entry in map(msgspec.json.Decoder(AnyEntry).decode, journal.read_bytes().splitlines()):
            if isinstance(entry, Updated) and entry.at > self._began:
                for table in entry.tables:
                    self._updated[table].append(entry.at)

    def _take(self, name: str, event: Event) -> None:
        match event:
            case Warm():
                self._warm += 1
            case Inner():
                self._inner[name].append(event)
                counts = ", ".join(str(len(steps)) for steps in self._inner.values())
                self._tell(f"{event.at_s:.0f} s, inner steps {counts}, {event.loss:.3f} nats a byte")
            case Learned():
                self._learned[name] = event
            case Restarted(reason=reason):
                self._tell(f"{name} {reason.partition(';')[0]}, started again")

    def figures(self, links: Links) -> Run:
        """Returns the training's figures."""
        learning, inner = self._learning, list(self._inner.values())
        taken = [step for steps in inner for step in steps]
        if not all(inner):
            raise EngineError("a learner took no inner step: give more seconds")
        least_s = 0.0 if self._deaths == 0 else self._seconds  # a learner that died late may not have returned
        room = sum(max(steps[-1].at_s, least_s) / learning.pace_of(rank) for rank, steps in enumerate(inner))
        late = [step.computing_s > learning.pace_of(rank) for rank, steps in enumerate(inner) for step in steps]
        recipe = learning.recipe()
        read = len(taken) * recipe.batch * (recipe.context or CONTEXT)
        merged = [each.merged for each in self._learned.values() if each.merged is not None]
        gaps = [after - before for at in self._updated.values() for before, after in pairwise(at)]
        carried = None if self._nbytes is None else self._nbytes / len(taken)
        return Run(
            steps=[len(steps) for steps in inner],
            seconds=max(step.at_s for step in taken),
            goodput=len(taken) / room,
            stall=max(step.stall_s / learning.pace_of(rank) for rank, steps in enumerate(inner) for step in steps),
            overrun=sum(late) / len(late),
            merged=max(merged) / read if merged else None,
            gap_s=max(gaps, default=None),
            deaths=self._deaths,
            loss=next((each.loss for each in self._learned.values() if each.loss is not None), None),
            carried=carried,
            below_ddp=ring_nbytes(learning) / carried if carried else None,
            shaping=links.shaping,
        )


def ring_nbytes(learning: Learning) -> float:
    """Returns the bytes that a rank of plain DDP sends and receives in a step, in a ring, without headers."""
    ranks = len(learning.speeds)
    return 2 * 2 * (ranks - 1) / ranks * 4 * sum(each.numel() for each in learning.training(0).model.parameters())


def _start_server(group: RankGroup, journal: Path) -> str:
    """Starts the server, which needs one learner at least; returns its address."""
    private = group.engine.listen_at(SERVER)
    hosted = not private.startswith("127.")
    arguments = ["server", "--listen", private, "--min-workers", "1", "--journal", str(journal)]
    serving = own_command(*arguments, *(["--insecure"] if hosted else []), "--events")
    group.engine.start(SERVER, serving, host=SERVER if hosted else None)
    return f"grpc://{group.engine.wait_for(SERVER, Listening, START_TIMEOUT_S).address}"


def _name(rank: int) -> str:
    return f"learner {rank}"
