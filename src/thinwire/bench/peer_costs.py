"""What a message between two ranks costs on this machine: processor seconds of either end.

Ranks average a small tensor as plain DDP does its gradients, and compute before each time, as in a training: they share
cores, and what one computes drives the other's messages out of the caches. Processor seconds are the processes' own;
what the same computing takes without an exchange is left out.
"""

from __future__ import annotations

import statistics
import time

from thinwire.bench.harness import Role, Stage
from thinwire.bench.rank_group import RankGroup
from thinwire.engines.events import Event
from thinwire.errors import EngineError

SILENCE_S = 60.0
_VALUES = 250
_WARMING, _ROUNDS, _COUNT = 10, 5, 40
_WIDTH, _TOUCHED = 256, 1_000_000
"""What is computed before an exchange: a product of matrices of this width, and a pass over so many values."""


class PeerMeasured(Event, frozen=True, kw_only=True):
    """Processor seconds of one rank for a message that it sends or takes."""

    message_s: float


class PeerRank(Role, frozen=True, kw_only=True):
    """One of some ranks that average a small tensor many times.

    Args:
        rank: this rank.
        ranks: how many there are.
        master: host and port of rank 0.
    """

    rank: int
    ranks: int
    master: str

    def play(self, stage: Stage) -> None:
        """Averages, and reports what a message took."""
        import torch
        import torch.distributed as dist

        from thinwire.bench.groups import join

        join(self.master, rank=self.rank, ranks=self.ranks, silence_s=SILENCE_S)
        values = torch.zeros(_VALUES)
        for _ in range(_WARMING):
            dist.all_reduce(values)
        weights, activations = torch.randn(2, _WIDTH, _WIDTH), torch.zeros(_TOUCHED)

        def compute() -> None:
            torch.mm(weights[0], weights[1])
            activations.add_(1.0)

        spent = 0.0
        for _ in range(_ROUNDS):  # in turn, for processors change their pace
            for exchanges, sign in ((True, 1), (False, -1)):
                begun = time.process_time()
                for _ in range(_COUNT):
                    compute()
                    if exchanges:
                        dist.all_reduce(values)
                spent += sign * (time.process_time() - begun)
        # A ring of N ranks sends N − 1 parts and then N − 1 sums; as many come.
        stage.report(PeerMeasured(message_s=max(0.0, spent) / (_ROUNDS * _COUNT * 4 * (self.ranks - 1))))
        dist.barrier()
        dist.destroy_process_group()


def measure_peer_message_s(ranks: int = 4) -> float:
    """Returns the processor seconds of a rank for a message, the median over the ranks; takes some seconds.

    Args:
        ranks: how many processes exchange messages on this machine, 2 or more.

    Raises:
        EngineError: a process failed.
    """
    found: list[float] = []
    with RankGroup([PeerMeasured]) as group:
        group.start([PeerRank(rank=rank, ranks=ranks, master=group.master) for rank in range(ranks)])
        for _, event in group.engine.events(silence_s=SILENCE_S):
            if isinstance(event, PeerMeasured):
                found.append(event.message_s)
    if len(found) != ranks:
        raise EngineError(f"{len(found)} of {ranks} ranks measured what a message costs")
    return statistics.median(found)
