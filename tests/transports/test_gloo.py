"""A peer group over gloo, with real processes: messages by tag, into buffers that are longer, and leaving together."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ddp_ranks import ddp, mlp, run_ranks, train
from thinwire.runtime.peers import gather, leave
from thinwire.transports.gloo import GlooPeerGroup
from thinwire.transports.peers import ReceiveBuffer

TIMEOUT = timedelta(seconds=20)
PAIR_FILES = 5
"""What a group of three ranks has open, at least."""


def talk(rank: int) -> list[Any]:
    group = GlooPeerGroup([0, 1, 2], TIMEOUT)
    heard: list[Any] = [group.rank, group.peers, gather(group, b"x" * rank)]
    receives = [group.receive(peer, ReceiveBuffer(64), tag) for peer in group.peers for tag in (5, 4)]
    texts = [(peer, tag, f"{rank} to {peer}, tag {tag}") for tag in (4, 5) for peer in group.peers]
    sends = [group.send(peer, bytearray(text.encode()), tag) for peer, tag, text in texts]
    heard.append([bytes(group.wait(receive)[:13]).decode() for receive in receives])
    for send in sends:
        group.wait(send)
    leave(group, TIMEOUT)
    return heard


def test_messages_arrive_by_tag_whatever_the_order() -> None:
    for rank, heard in enumerate(run_ranks(3, talk)):
        peers = [other for other in range(3) if other != rank]
        expected = [f"{peer} to {rank}, tag {tag}" for peer in peers for tag in (5, 4)]
        assert heard == [rank, peers, [b"", b"x", b"xx"], expected]


def compress_again_and_again(rank: int, codec: str) -> list[tuple[int, int]]:
    """What a rank holds after each of several trainings, which ranks close in another order every time."""
    held = []
    for run in range(5):
        model = DistributedDataParallel(mlp(0))
        state = ddp.compress(model, codec)
        train(model, rank, 4)
        if (rank + run) % 3 == 0:
            dist.barrier()
        state.close()
        if (rank + run) % 3:
            dist.barrier()
        del model, state
        gc.collect()
        tasks = Path("/proc/self/task")
        held.append((len(list(Path("/proc/self/fd").iterdir())), len(list(tasks.iterdir()))))
    return held


@pytest.mark.parametrize("codec", ["3lc", "auto"])
def test_groups_that_all_ranks_have_closed_end_when_they_meet_again(codec: str) -> None:
    for held in run_ranks(3, compress_again_and_again, codec):
        (files, threads), (files_later, threads_later) = held[1], held[-1]  # torch lets go of some a little later
        assert files_later < files + PAIR_FILES and threads_later <= threads, held
