"""A peer group over gloo, torch.distributed's CPU backend, with separate connections.

Messages are point-to-point with tags, so no order of collectives has to be kept. The bytes are in host memory: the
group is gloo even where gradients are on GPUs and DDP uses NCCL. gloo accepts a message shorter than its buffer.

The group is not registered with torch. torch names groups by their number on a rank, so ranks with different numbers
of groups would wait for different names. An unregistered group also ends with this object.
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
"""Seconds after which missing ranks are logged; a rank may still be reading its data."""
_log = logging.getLogger(__name__)


class GlooPeerGroup(PeerGroup):
    """Ranks of the default process group, connected by gloo.

    Args:
        ranks: global ranks, the same list on every rank.
        timeout: longest wait for a peer.

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
    """Waits until all ranks have called this equally often, and names missing ranks, which torch's own wait does not.

    Args:
        store: of the default process group.
        rank: this global rank.
        ranks: global ranks, the same list on every rank, this one included.
        timeout: longest wait.
        patience_s: seconds after which missing ranks are logged.

    Returns:
        A prefix for keys in the store that only these ranks have, and only from this call.

    Raises:
        TransportError: some ranks did not come in time; the message names them.
        RuntimeError: the store is gone, and with it the rank that holds it.
    """
    # The store counts the calls: after a restart, all ranks have a new store.
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
