"""A peer group over gloo, torch.distributed's CPU backend, by connections of its own.

Point-to-point with tags, so no order of collectives has to be kept. The bytes are host memory: the group is gloo even
where gradients live on GPUs and DDP itself uses NCCL. gloo lets a shorter message into a longer buffer.

torch is not told of the group: it names its own by how many a rank knows, so that ranks which know one more than others
would wait for groups of another name. And what only this object knows ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import DeadlineError, ThinwireError, TransportError
from thinwire.transports.peers import PeerGroup, ReceiveBuffer, Transfer
from thinwire.transports.roll_call import roll_call


class GlooPeerGroup(PeerGroup):
    """Ranks of the default process group that meet in a gloo group.

    Args:
        ranks: their global ranks, the same list everywhere.
        timeout: how long a peer may keep this rank waiting.

    Raises:
        TransportError: not every rank came in time.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        self.timeout = timeout
        self.size = len(ranks)
        self._ranks = list(ranks)
        self.rank = self._ranks.index(dist.get_rank())
        try:
            store = dist.distributed_c10d._get_default_store()
            meeting = roll_call(store, dist.get_rank(), ranks, timeout)
            named = dist.PrefixStore(f"{meeting}/gloo", store)  # type: ignore[attr-defined]
            self._group: Any = dist.ProcessGroupGloo(named, self.rank, self.size, timeout)
        except (RuntimeError, dist.DistError) as error:
            raise TransportError(
                f"rank {dist.get_rank()} could not meet the others within {timeout.total_seconds():g} s; every rank "
                f"must call compress: {error}"
            ) from error

    @property
    def names(self) -> Sequence[int]:
        return self._ranks

    def receive(self, peer: int, buffer: ReceiveBuffer, tag: int) -> Transfer:
        try:
            work = self._group.recv([torch.from_numpy(buffer.array)], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        return Transfer(peer, work, buffer.data)

    def send(self, peer: int, data: bytearray, tag: int) -> Transfer:
        try:
            work = self._group.send([torch.frombuffer(data, dtype=torch.uint8)], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        return Transfer(peer, work, memoryview(data))

    def wait(self, transfer: Transfer, timeout: timedelta | None = None) -> memoryview:
        try:
            transfer.work.wait(self.timeout if timeout is None else timeout)
        except RuntimeError as error:
            raise self._lost(transfer.peer, error) from error
        return transfer.data

    def _lost(self, peer: int, error: RuntimeError) -> ThinwireError:
        text, they, we = str(error).splitlines()[0][:300], self.names[peer], self.names[self.rank]
        if "timed out" in text.lower():
            return DeadlineError(
                f"rank {they} kept rank {we} waiting for more than {self.timeout.total_seconds():g} s: it has "
                f"stopped, or runs another training loop ({text})"
            )
        return TransportError(f"rank {they} is gone, as rank {we} sees it; start all ranks again ({text})")
