"""What processes of one machine cost each other: messages between ranks, and processors that trainings share.

Ranks average a small tensor as plain DDP does its gradients, and compute before each time, as in a training: they share
cores, and what one computes drives the other's messages out of the caches. Processor seconds are the processes' own;
what the same computing takes without an exchange is left out. DDP's all-reduce goes round a ring, every rank waiting
for the one before; ours goes to all others and back. Where ranks share processors each hop of the ring waits until the
next rank has one, which no processor is busy with: the clock tells it, held against an exchange of two hops.

For shared processors the ranks make a workload's own steps in lockstep and exchange nothing; in turn with that, the
first makes its steps alone. Caches that others have filled make a step take more of a processor, and the kernel leaves
a processor idle for a while where two processes wait for another, which all then wait for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from thinwire.engines.events import Event
from thinwire.planner.peer_costs import PeerCosts
from thinwire.planner.transport_costs import Sharing
from thinwire_lab.bench.rank_group import RankGroup, gathered
from thinwire_lab.bench.roles import Role, Stage, join
from thinwire_lab.engines.namespaces import available
from thinwire_lab.engines.starters import Starter
from thinwire_lab.workloads.profiling import training_step

SILENCE_S = 120.0
_VALUES = 250
_WARMING, _ROUNDS, _COUNT = 10, 5, 40
_WIDTH, _TOUCHED = 256, 1_000_000
"""What is computed before an exchange: a product of matrices of this width, and a pass over so many values."""
_STEPS_BEFORE, _STEPS = 4, 24
"""Steps of a workload before any is counted, and of each round."""


class PeerMeasured(Event, frozen=True, kw_only=True):
    """What one rank measured of messages."""

    costs: PeerCosts


class Trained(Event, frozen=True, kw_only=True):
    """What the steps of one rank took, in seconds.

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


def measured(used_s: Sequence[float], lasted_s: Sequence[float], ranks: int, cores: int) -> tuple[float, float]:
    """Returns the seconds of a message and of a hop, from a rank's, those of computing aside.

    Both sequences have what computing once takes, of its processor and by the clock: with a ring behind it, with two
    hops behind it, and alone.
    """
    # A ring of N ranks sends N − 1 parts and then N − 1 sums; as many come.
    hops = 2 * (ranks - 1)
    waited_s = lasted_s[0] - lasted_s[1] - ranks / min(ranks, cores) * (used_s[0] - used_s[1])
    message_s = round(max(0.0, used_s[0] - used_s[2]) / (2 * hops), 9)
    return message_s, round(max(0.0, waited_s) / (hops - 2), 9) if hops > 2 else 0.0


class PeerRank(Role, frozen=True, kw_only=True):
    """One of some ranks that average a small tensor many times."""

    rank: int
    ranks: int
    master: str

    def play(self, stage: Stage) -> None:
        """Averages, and reports what a message took."""
        join(self.master, rank=self.rank, ranks=self.ranks, silence_s=SILENCE_S)
        values, others = torch.zeros(_VALUES), [rank for rank in range(self.ranks) if rank != self.rank]
        weights, activations = torch.randn(2, _WIDTH, _WIDTH), torch.zeros(_TOUCHED)
        part, parts = values[: _VALUES // self.ranks].clone(), torch.zeros(self.ranks, _VALUES // self.ranks)

        def ring() -> None:
            dist.all_reduce(values)

        def two_hops() -> None:
            for _ in range(2):
                works = [dist.isend(part, rank) for rank in others] + [dist.irecv(parts[rank], rank) for rank in others]
                for work in works:
                    assert work is not None
                    work.wait()

        ways: list[Callable[[], object]] = [ring, two_hops, lambda: None]
        for _ in range(_WARMING):
            for exchange in ways:
                exchange()
        used, lasted = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        for _ in range(_ROUNDS):  # in turn, for processors change their pace
            for way, exchange in enumerate(ways):
                dist.barrier()
                clock, begun = time.perf_counter(), time.process_time()
                for _ in range(_COUNT):
                    torch.mm(weights[0], weights[1])
                    activations.add_(1.0)
                    exchange()
                used[way] += (time.process_time() - begun) / (_ROUNDS * _COUNT)
                lasted[way] += (time.perf_counter() - clock) / (_ROUNDS * _COUNT)
        message_s, hop_s = measured(used, lasted, self.ranks, os.cpu_count() or 1)
        costs = PeerCosts(message_s=message_s, hop_s=hop_s)
        stage.report(PeerMeasured(costs=costs))
        dist.barrier()
        dist.destroy_process_group()


def measure_peer_costs(ranks: int = 4) -> PeerCosts:
    """Returns what messages cost, medians over two ranks or more; takes some seconds.

    Ranks have links of their own without a limit, as in measured trainings, if this user may make them.
    """

    def roles(group: RankGroup) -> list[PeerRank]:
        return [PeerRank(rank=rank, ranks=ranks, master=group.master) for rank in range(ranks)]

    hosts = [f"rank {rank}" for rank in range(ranks)] if available()[0] else []
    found = [each.costs for each in gathered(PeerMeasured, roles, hosts=hosts, silence_s=SILENCE_S)]
    return PeerCosts(**{each.name: median(getattr(costs, each.name) for costs in found) for each in fields(PeerCosts)})


class SharingRank(Role, frozen=True, kw_only=True):
    """One of the ranks that train side by side; while the first is alone it makes `copies` trainings in turn."""

    rank: int
    ranks: int
    master: str
    model: str
    data: str
    batch: int | None = None
    copies: int = 1

    def play(self, stage: Stage) -> None:
        """Trains, and reports what its steps took."""
        join(self.master, rank=self.rank, ranks=self.ranks, silence_s=SILENCE_S)
        first = self.rank == 0
        ranks = [(self.rank + each) % self.ranks for each in range(self.copies if first else 1)]
        steps = [
            training_step(self.model, self.data, rank=rank, workers=self.ranks, batch=self.batch)[1] for rank in ranks
        ]
        for step in steps * _STEPS_BEFORE:
            step()
        alone, beside = list[float](), list[float]()
        used_s = lasted_s = 0.0
        for _ in range(_ROUNDS):  # in turn, for processors change their pace
            dist.barrier()
            if first:
                alone.extend(_cpu_s(step) for _ in range(_STEPS) for step in steps)
            dist.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            for _ in range(_STEPS):
                beside.append(_cpu_s(steps[0]))
                dist.barrier()
            used_s += (time.process_time() - cpu) / (_ROUNDS * _STEPS)
            lasted_s += (time.perf_counter() - begun) / (_ROUNDS * _STEPS)
        alone_s = median(alone) if alone else None
        stage.report(Trained(alone_s=alone_s, beside_s=median(beside), used_s=used_s, lasted_s=lasted_s))
        dist.destroy_process_group()


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
    """Returns what a workload's ranks take from each other on this machine; takes some seconds for each."""
    if ranks == 1:
        return Sharing()
    given: dict[str, Any] = {"model": model, "data": data, "batch": batch, "copies": copies}

    def roles(group: RankGroup) -> list[SharingRank]:
        return [SharingRank(rank=rank, ranks=ranks, master=group.master, **given) for rank in range(ranks)]

    found = gathered(Trained, roles, silence_s=SILENCE_S, starter=starter)
    return sharing_of(found, min(ranks, cores or os.cpu_count() or 1))


def sharing_of(found: Sequence[Trained], cores: int) -> Sharing:
    """Returns what the steps of all ranks come to, on so many processors."""
    [alone_s] = [each.alone_s for each in found if each.alone_s is not None]
    # Noise can make others look like a help; they are none.
    slowdown = max(1.0, fmean(each.beside_s for each in found) / alone_s)
    use = sum(each.used_s for each in found) / cores / fmean(each.lasted_s for each in found)
    return Sharing(slowdown=round(slowdown, 4), use=round(min(1.0, use), 4))


def _cpu_s(step: Callable[[], None]) -> float:
    begun = time.thread_time()
    step()
    return time.thread_time() - begun
