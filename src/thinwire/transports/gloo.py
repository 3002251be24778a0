"""A peer group over gloo, torch.distributed's CPU backend, by connections of its own.

Point-to-point with tags, so no order of collectives has to be kept. The bytes are host memory: the group is gloo even
where gradients live on GPUs and DDP itself uses NCCL. gloo lets a shorter message into a longer buffer.

torch is not told of the group: it names its own by how many a rank knows, so that ranks which know one more than others
would wait for groups of another name. And what only this object knows ends with it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import DeadlineError, ThinwireError, TransportError
from thinwire.transports.peers import PeerGroup, ReceiveBuffer, Transfer

PATIENCE_S = 30.0
"""After so long it is logged which ranks are missing: one may still be reading its data."""
_log = logging.getLogger(__name__)


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
            meeting = call_roll(store, dist.get_rank(), ranks, timeout)
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


def call_roll(
    store: Any, rank: int, ranks: Sequence[int], timeout: timedelta, *, patience_s: float = PATIENCE_S
) -> str:
    """Waits until all ranks have called this equally often: a process group that waits for its ranks names none.

    Args:
        store: of the default process group.
        rank: this one, of all.
        ranks: their global ranks, the same list everywhere, this one among them.
        timeout: how long to wait.
        patience_s: after how many seconds to log which ranks are missing.

    Returns:
        A name that these ranks and no others have from this call: what begins with it in the store is theirs.

    Raises:
        TransportError: some did not come in time; the message names them.
        RuntimeError: the store is gone, and with it the rank that holds it.
    """
    # Counted in the store: a process that takes a lost one's place finds a new store, as the others do.
    these = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    meeting = f"thinwire/{these}/{store.add(f'thinwire/{these}/calls/{rank}', 1)}"
    store.set(f"{meeting}/{rank}", "here")
    begun, pause_s, told = time.monotonic(), 0.001, False
    while not store.check([f"{meeting}/{each}" for each in ranks]):
        waited_s, most_s = time.monotonic() - begun, timeout.total_seconds()
        if waited_s >= most_s or (waited_s >= patience_s and not told):
            absent = [str(each) for each in ranks if not store.check([f"{meeting}/{each}"])]
            missing = f"rank{'s' * (len(absent) > 1)} {', '.join(absent)}" if absent else "a rank"
            told = True
            if waited_s >= most_s:
                raise TransportError(f"{missing} did not come within {most_s:g} s; every rank must call compress")
            kept = f"{missing} kept rank {rank} waiting for {waited_s:.0f} s: every rank must call compress"
            _log.warning("%s, or tw.distribute, within %g s", kept, most_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.25)
    return meeting
