"""What messages between ranks cost on this machine: processor seconds of either end and byte, and what a ring waits.

Ranks average a small tensor as plain DDP does its gradients, and compute before each time, as in a training: they share
cores, and what one computes drives the other's messages out of the caches. Processor seconds are the processes' own;
what the same computing takes without an exchange is left out. DDP's all-reduce goes round a ring, every rank waiting
for the one before; ours goes to all others and back. Where ranks share processors each hop of the ring waits until the
next rank has one, which no processor is busy with: the clock tells it, held against an exchange of two hops.

Packets of two sizes give the cost of a byte of a local update: every rank sends them to the next one and back,
encrypted as in training, and a rank's processor seconds are those of four ends.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from thinwire.engines.events import Event
from thinwire.planner.peer_costs import PeerCosts
from thinwire_lab.bench.rank_group import RankGroup, gathered
from thinwire_lab.bench.roles import Role, Stage
from thinwire_lab.engines.namespaces import available

SILENCE_S = 60.0
_VALUES = 250
_WARMING, _ROUNDS, _COUNT = 10, 5, 40
SMALL_NBYTES, LARGE_NBYTES = 1_000, 400_000
_ECHO_ROUNDS, _ECHOES = 5, 10
_ECHOED = 4 * _ECHO_ROUNDS * _ECHOES
"""Packets that a rank sends or takes: its own go there and come back, and so do those of the rank before."""
_WIDTH, _TOUCHED = 256, 1_000_000
"""What is computed before an exchange: a product of matrices of this width, and a pass over so many values."""


class PeerMeasured(Event, frozen=True, kw_only=True):
    """What one rank measured, in seconds; see `PeerCosts`."""

    message_s: float
    hop_s: float
    byte_s: float


def measured(used_s: Sequence[float], lasted_s: Sequence[float], ranks: int, cores: int) -> tuple[float, float]:
    """Returns the seconds of a message and of a hop, from a rank's, those of computing aside.

    Example:
        Twelve messages of a ring of four take .15 ms each; it lasts 3 ms longer than two hops, 1 ms of which the two
        processors are busy with, and the rest is of the four hops that it has more.

        >>> measured([0.0028, 0.0023, 0.001], [0.009, 0.006, 0.002], ranks=4, cores=2)
        (0.00015, 0.0005)
        >>> measured([0.0028, 0.0023, 0.001], [0.009, 0.006, 0.002], ranks=2, cores=2)
        (0.00045, 0.0)
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
        import torch
        import torch.distributed as dist

        from thinwire_lab.bench.groups import join

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

        def compute() -> None:
            torch.mm(weights[0], weights[1])
            activations.add_(1.0)

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
                    compute()
                    exchange()
                used[way] += (time.process_time() - begun) / (_ROUNDS * _COUNT)
                lasted[way] += (time.perf_counter() - clock) / (_ROUNDS * _COUNT)
        message_s, hop_s = measured(used, lasted, self.ranks, os.cpu_count() or 1)
        stage.report(PeerMeasured(message_s=message_s, hop_s=hop_s, byte_s=_byte_s(self.rank, self.ranks)))
        dist.barrier()
        dist.destroy_process_group()


def _byte_s(rank: int, ranks: int) -> float:
    """What a byte takes of this rank's processor; all ranks call it together."""
    import torch.distributed as dist

    from thinwire.runtime.rank_shards import own_host, private_options
    from thinwire.transports import sockets
    from thinwire.transports.sockets import Loop
    from thinwire_lab.bench.transport_costs import Echo

    group = dist.group.WORLD
    assert group is not None
    options, loop = private_options(group, rank, ranks), Loop(f"echo-{rank}")
    with closing(loop):
        host = f"{own_host(group, rank, ranks)}:0"
        server = sockets.serve(lambda sender: Echo(sender, threading.Event()), host, options=options, loop=loop)
        addresses = [""] * ranks
        dist.all_gather_object(addresses, server.address)
        connection = sockets.connect(addresses[(rank + 1) % ranks], options=options, loop=loop)
        used_s = {SMALL_NBYTES: 0.0, LARGE_NBYTES: 0.0}
        for number in range(_ECHO_ROUNDS + 1):
            for nbytes in used_s:
                dist.barrier()
                begun = time.process_time()
                for _ in range(_ECHOES):
                    connection.send(bytes(nbytes))
                    connection.receive(SILENCE_S)
                dist.barrier()  # it has served another rank meanwhile
                used_s[nbytes] += (time.process_time() - begun) * (number > 0)  # the first warms
        connection.close()
        dist.barrier()
        server.stop()
    return max(0.0, (used_s[LARGE_NBYTES] - used_s[SMALL_NBYTES]) / _ECHOED / (LARGE_NBYTES - SMALL_NBYTES))


def measure_peer_costs(ranks: int = 4) -> PeerCosts:
    """Returns what messages cost, medians over the ranks; takes some seconds.

    Ranks have links of their own without a limit, as in measured trainings, if this user may make them.
    """

    def roles(group: RankGroup) -> list[PeerRank]:
        return [PeerRank(rank=rank, ranks=ranks, master=group.master) for rank in range(ranks)]

    hosts = [f"rank {rank}" for rank in range(ranks)] if available()[0] else []
    found = gathered(PeerMeasured, roles, hosts=hosts, silence_s=SILENCE_S)
    return PeerCosts(
        message_s=statistics.median(each.message_s for each in found),
        hop_s=statistics.median(each.hop_s for each in found),
        byte_s=statistics.median(each.byte_s for each in found),
    )
