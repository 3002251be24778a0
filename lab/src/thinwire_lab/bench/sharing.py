"""What processes that share this machine's processors take from each other: measured by training side by side.

As many processes as are to share the processors make a workload's own steps in lockstep, and exchange nothing: after
each step they meet, and whoever comes last lets all go on. In turn with that, the first makes its steps alone. Caches
that others have filled make a step take more of a processor; and the kernel leaves one processor idle for a while where
two processes wait for another, which everybody then waits for. Both are the machine's and the step's, of whatever is
exchanged.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from statistics import fmean, median

from thinwire.engines.events import Event
from thinwire.engines.roles import own_command
from thinwire.errors import EngineError
from thinwire.planner.transport_costs import Sharing
from thinwire_lab.bench.roles import Role, Stage
from thinwire_lab.engines.local import LocalEngine
from thinwire_lab.engines.starters import Starter

SILENCE_S = 120.0
WARMING, ROUNDS, STEPS = 4, 5, 24
"""Steps of each before any is counted; then how often both ways are gone through, and in how many steps each."""


class Trained(Event, frozen=True, kw_only=True):
    """What the steps of one process took, in seconds.

    Attributes:
        alone_s: of a processor for a step while the others stood still; None where this one stood still.
        beside_s: of a processor for a step beside the others.
        used_s: of a processor for a step beside the others, with what meeting them takes.
        lasted_s: of such a step by the clock on the wall.
    """

    alone_s: float | None
    beside_s: float
    used_s: float
    lasted_s: float


class SharingRank(Role, frozen=True, kw_only=True):
    """One of the processes that train side by side."""

    rank: int
    ranks: int
    meeting: str
    model: str
    data: str
    batch: int | None = None
    copies: int = 1

    def play(self, stage: Stage) -> None:
        """Trains, and reports what its steps took."""
        from thinwire.planner.models import torch_threads
        from thinwire_lab.workloads.profiling import training_step

        def step_of(rank: int) -> Callable[[], None]:
            return training_step(self.model, self.data, rank=rank, workers=self.ranks, batch=self.batch)[1]

        first, (host, _, port) = self.rank == 0, self.meeting.rpartition(":")
        with torch_threads(1), socket.create_connection((host, int(port)), SILENCE_S) as meeting:
            steps = [step_of((self.rank + each) % self.ranks) for each in range(self.copies if first else 1)]
            for step in steps * WARMING:
                step()
            alone, beside = list[float](), list[float]()
            used_s = lasted_s = 0.0
            for _ in range(ROUNDS):  # in turn, for processors change their pace
                _meet(meeting)
                if first:
                    alone.extend(_cpu_s(step) for _ in range(STEPS) for step in steps)
                _meet(meeting)
                begun, cpu = time.perf_counter(), time.process_time()
                for _ in range(STEPS):
                    beside.append(_cpu_s(steps[0]))
                    _meet(meeting)
                used_s += time.process_time() - cpu
                lasted_s += time.perf_counter() - begun
            number = ROUNDS * STEPS
            stage.report(
                Trained(
                    alone_s=median(alone) if alone else None,
                    beside_s=median(beside),
                    used_s=used_s / number,
                    lasted_s=lasted_s / number,
                )
            )


def measure_sharing(
    model: str,
    data: str,
    *,
    ranks: int,
    batch: int | None = None,
    cores: int | None = None,
    copies: int = 1,
    starter: Starter | None = None,
) -> Sharing:
    """Returns what a workload's processes take from each other on this machine; takes some seconds for each."""
    if ranks == 1:
        return Sharing()
    found: list[Trained] = []
    with ExitStack() as stack:
        meeting = stack.enter_context(_Meeting(ranks))
        engine = stack.enter_context(LocalEngine([Trained], starter=starter))
        for rank in range(ranks):
            role = SharingRank(
                rank=rank, ranks=ranks, meeting=meeting.address, model=model, data=data, batch=batch, copies=copies
            )
            engine.start(f"rank {rank}", own_command(*role.command(), "--events"))
        found += [event for _, event in engine.events(silence_s=SILENCE_S) if isinstance(event, Trained)]
    if len(found) != ranks:
        raise EngineError(f"{len(found)} of {ranks} processes said what training side by side takes")
    return sharing_of(found, min(ranks, cores or os.cpu_count() or 1))


def sharing_of(found: list[Trained], cores: int) -> Sharing:
    """Returns what the steps of all processes come to, on so many processors.

    Example:
        >>> alike = dict(beside_s=0.006, used_s=0.007, lasted_s=0.0175)
        >>> sharing_of([Trained(alone_s=0.005, **alike), *(3 * [Trained(alone_s=None, **alike)])], 2)
        Sharing(slowdown=1.2, use=0.8)
    """
    [alone_s] = [each.alone_s for each in found if each.alone_s is not None]
    # Noise can make others look like a help; they are none.
    slowdown = max(1.0, fmean(each.beside_s for each in found) / alone_s)
    use = sum(each.used_s for each in found) / cores / fmean(each.lasted_s for each in found)
    return Sharing(slowdown=round(slowdown, 4), use=round(min(1.0, use), 4))


def _cpu_s(step: Callable[[], None]) -> float:
    begun = time.thread_time()
    step()
    return time.thread_time() - begun


def _meet(meeting: socket.socket) -> None:
    meeting.sendall(b".")
    if not meeting.recv(1):
        raise EngineError("the others have gone")


class _Meeting:
    """Where processes meet: once all have come, all go on."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._thread = threading.Thread(target=self._serve, name="thinwire-meeting", daemon=True)

    def __enter__(self) -> _Meeting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who still waits for a process that never came
        self._thread.join()  # all processes have ended, and their connections with them
        self._listener.close()

    def _serve(self) -> None:
        peers: list[socket.socket] = []
        with suppress(OSError):  # a process failed, which the engine says
            while len(peers) < self._ranks:
                peers.append(self._listener.accept()[0])
            while all(peer.recv(1) for peer in peers):
                for peer in peers:
                    peer.sendall(b".")
        for peer in peers:
            peer.close()
