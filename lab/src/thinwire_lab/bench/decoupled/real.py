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
from thinwire.errors import EngineError
from thinwire.policies.designs import design
from thinwire.runtime.journal import AnyEntry, Updated
from thinwire_lab.bench.cells import SILENCE_S, Warm
from thinwire_lab.bench.decoupled.learner import Inner, Learned, LearnerRank, Learning
from thinwire_lab.bench.harness import Figures, Tell
from thinwire_lab.bench.options import ALONE
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
    # Each byte has one sender: the sum over learners and server is all that learners sent and received.
    hosts = [*(f"host {rank}" for rank in ranks), SERVER] if links.shaping == "kernel" else []
    local = None if learning.design == ALONE else design(learning.design).local
    waits = local is not None and not local.quorum
    steps = int(seconds * min(learning.speeds) / learning.pace_s) if waits else None
    deaths = int(seconds * QUIET_END / kill_every_s) if kill_every_s else 0
    reports = _Reports(learning, tell)
    with RankGroup([Warm, Inner, Learned, Listening], hosts=hosts, starter=forks()) as group:
        journal, server = Path(group.gate) / "journal.jsonl", None
        if learning.design != ALONE:
            server = group.start_server("--min-workers", "1", "--journal", str(journal))
        roles = [
            LearnerRank(learning=learning, seconds=seconds, steps=steps, rank=rank, server=server, **group.where)
            for rank in ranks
        ]
        group.start(roles, restarts=deaths)
        heard, began, killed = time.monotonic(), float("inf"), 0
        while len(reports.learned) < len(ranks):
            came = group.engine.poll(0.1)
            if came is not None:
                heard = time.monotonic()
                reports.take(*came)
            elif time.monotonic() > heard + SILENCE_S:
                raise EngineError(f"no report of a learner for {SILENCE_S:g} s")
            if reports.warm == len(ranks) and began == float("inf"):
                group.begin(links.rate)
                began = time.time()
            if kill_every_s and killed < deaths and time.time() > began + kill_every_s * (killed + 1):
                killed += 1
                group.engine.signal(f"rank {killed % len(ranks)}", signal.SIGKILL)
        return reports.figures(
            least_s=seconds if killed else 0.0,  # a learner that died late may not have returned
            nbytes=group.sent(),
            gap_s=None if server is None else _longest_gap(journal, began),
            deaths=killed,
            shaping=links.shaping,
        )


class _Reports:
    """The reports of one training's learners."""

    def __init__(self, learning: Learning, tell: Tell) -> None:
        self._learning, self._tell = learning, tell
        self._inner: dict[str, list[Inner]] = {f"rank {rank}": [] for rank in range(len(learning.speeds))}
        self.learned: dict[str, Learned] = {}
        self.warm = 0

    def take(self, name: str, event: Event) -> None:
        match event:
            case Warm():
                self.warm += 1
            case Inner():
                self._inner[name].append(event)
                counts = ", ".join(str(len(steps)) for steps in self._inner.values())
                self._tell(f"{event.at_s:.0f} s, inner steps {counts}, {event.loss:.3f} nats a byte")
            case Learned():
                self.learned[name] = event
            case Restarted(reason=reason):
                self._tell(f"{name} {reason.partition(';')[0]}, started again")

    def figures(self, *, least_s: float, nbytes: int | None, gap_s: float | None, deaths: int, shaping: str) -> Run:
        """Returns the training's figures; a learner could take steps for `least_s` seconds at least."""
        inner = list(self._inner.values())
        if not all(inner):
            raise EngineError("a learner took no inner step: give more seconds")
        paces = [self._learning.pace_of(rank) for rank in range(len(inner))]
        paced = [(step, pace_s) for steps, pace_s in zip(inner, paces, strict=True) for step in steps]
        room = sum(max(steps[-1].at_s, least_s) / pace_s for steps, pace_s in zip(inner, paces, strict=True))
        recipe = self._learning.recipe()
        read = len(paced) * recipe.batch * (recipe.context or CONTEXT)
        merged = [each.merged for each in self.learned.values() if each.merged is not None]
        carried = None if nbytes is None else nbytes / len(paced)
        return Run(
            steps=[len(steps) for steps in inner],
            seconds=max(step.at_s for step, _ in paced),
            goodput=len(paced) / room,
            stall=max(step.stall_s / pace_s for step, pace_s in paced),
            overrun=sum(step.computing_s > pace_s for step, pace_s in paced) / len(paced),
            merged=max(merged) / read if merged else None,
            gap_s=gap_s,
            deaths=deaths,
            loss=next((each.loss for each in self.learned.values() if each.loss is not None), None),
            carried=carried,
            below_ddp=ring_nbytes(self._learning) / carried if carried else None,
            shaping=shaping,
        )


def ring_nbytes(learning: Learning) -> float:
    """Returns the bytes that a rank of plain DDP sends and receives in a step, in a ring, without headers."""
    ranks = len(learning.speeds)
    return 2 * 2 * (ranks - 1) / ranks * 4 * sum(each.numel() for each in learning.training(0).model.parameters())


def _longest_gap(journal: Path, began: float) -> float | None:
    """Returns the longest time between two versions of a table."""
    updated: dict[int, list[float]] = defaultdict(list)
    for entry in map(msgspec.json.Decoder(AnyEntry).decode, journal.read_bytes().splitlines()):
        if isinstance(entry, Updated) and entry.at > began:
            for table in entry.tables:
                updated[table].append(entry.at)
    return max((after - before for at in updated.values() for before, after in pairwise(at)), default=None)
