"""One training in one process, by a computed clock: the loss after a number of inner steps of each learner.

An inner step takes its learner's pace; everything else takes no time. Cores, codecs and messages are real.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from thinwire.hooks.decoupled_optimizer import DecoupledOptimizer
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer
from thinwire_lab.bench.decoupled.learner import Learning, take_step
from thinwire_lab.bench.harness import Figures, Tell
from thinwire_lab.jobs.virtual_time import Agenda

WINDOW = 20
"""A training loss is the mean of each learner's last 20 inner steps."""


class Loss(Figures, frozen=True, kw_only=True):
    """Losses in nats a byte, on the test text and in training; `versions` counts those of the first fragment."""

    loss: float
    training_loss: float
    versions: int | None = None


def train(learning: Learning, steps: Sequence[int], *, stagger: float = 0.25, tell: Tell = lambda text: None) -> Loss:
    """Trains once.

    Args:
        learning: the training of all learners.
        steps: inner steps of each learner, by rank.
        stagger: inner steps between the starts of two decoupled learners.
        tell: takes messages on progress.
    """
    agenda, ranks = Agenda(), range(len(steps))
    mades = [learning.training(rank) for rank in ranks]
    mades[0].copy().backward()  # several threads that load the arithmetic at once can fail
    losses: list[list[float]] = [[] for _ in ranks]
    with MemoryServer(serving(ServerCore(), clock=agenda)) as server, ThreadPoolExecutor(len(steps)) as pool:

        def join(rank: int) -> Any:
            opt = learning.join(mades[rank], rank, server.connect())
            opt.sync()
            return opt

        def step(rank: int, now_s: float = 0.0) -> None:
            done = len(losses[rank])
            losses[rank].append(take_step(mades[rank], opts[rank], done / steps[rank]))
            tell(f"step {done + 1} of {steps[rank]}, {losses[rank][-1]:.3f} nats a byte")

        def pace(rank: int, now_s: float) -> None:
            if len(losses[rank]) < steps[rank]:
                step(rank)
                agenda.note(now_s + learning.pace_of(rank), partial(pace, rank))

        def in_step(rank: int) -> None:
            for _ in range(steps[rank]):
                step(rank)

        def end(rank: int) -> None:
            opts[rank].flush()

        opts = list(pool.map(join, ranks))
        if decoupled := isinstance(opts[0], DecoupledOptimizer):
            for rank in ranks:
                agenda.note((1 + rank * stagger) * learning.pace_of(rank), partial(pace, rank))
            while agenda.next_s < float("inf"):
                agenda.advance()
        else:
            list(pool.map(in_step, ranks))
        ends = []
        for rank in ranks:
            before = server.bytes_received
            ends.append(pool.submit(end, rank))
            if decoupled:
                _settle(server, before)
        for each in ends:
            each.result()
        loss = learning.score(mades[0])
        list(pool.map(lambda opt: opt.close(), opts))
    last = [loss for each in losses for loss in each[-WINDOW:]]
    merge = opts[0].last_merge if decoupled else None
    return Loss(loss=loss, training_loss=sum(last) / len(last), versions=None if merge is None else merge.version)


def _settle(server: MemoryServer, before: int) -> None:
    """Waits until a learner has sent its last contributions: they are merged in the order in which they come."""
    now = before
    while now == before or now != server.bytes_received:
        now = server.bytes_received
        time.sleep(0.2)
