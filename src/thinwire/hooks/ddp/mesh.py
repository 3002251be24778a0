"""Moves messages between ranks over a gloo group of our own, and knows nothing of what they mean.

Point-to-point with a tag for each bucket and direction: messages of one tag arrive in the order in which they were
sent, whatever other buckets do, so no order of collectives has to be kept. gloo lets a shorter message into a longer
buffer (the head says how long it is), so receives are posted before anything is sent and no sizes are exchanged.
The bytes are host memory: the group is gloo even where gradients live on GPUs and DDP itself uses NCCL.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from thinwire.errors import DeadlineError, ProtocolError, ThinwireError, TransportError

_PROBE_TAG = 1 << 30
_PART_TAG = _PROBE_TAG + 1
_PROBE_NBYTES = tuple(1 << power for power in range(14, 24, 2))
_PROBE_ENOUGH_S = 0.03


class Landing:
    """Where messages of at most `nbytes` come to lie: one memory, as torch and as Python see it."""

    __slots__ = ("data", "tensor")

    def __init__(self, nbytes: int) -> None:
        # Untouched pages cost nothing, so room for the worst case is free.
        self.tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.data: memoryview = self.tensor.numpy().data


@dataclass(slots=True)
class Coming:
    """A message on its way: where it will lie, and whom it is from."""

    peer: int
    landing: Landing
    work: Any


class Mesh:
    """One rank's way to all others.

    Args:
        ranks: the global ranks that train together, the same list everywhere.
        timeout: how long a peer may keep this rank waiting.

    Raises:
        TransportError: not every rank came in time.
    """

    def __init__(self, ranks: list[int], timeout: timedelta) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        everyone = len(ranks) == dist.get_world_size()
        try:
            self._group = dist.new_group(
                ranks,
                timeout=timeout,
                backend="gloo",
                use_local_synchronization=not everyone,
                group_desc="thinwire",
            )
        except (RuntimeError, dist.DistError) as error:
            raise TransportError(
                f"rank {self.rank} could not meet the others within {timeout.total_seconds():g} s; every rank must "
                f"call ddp.compress: {error}"
            ) from error
        self._places = [dist.get_group_rank(self._group, rank) for rank in ranks]

    # ---- messages
    # dist.irecv and dist.isend look the group and the rank up for every message; that costs as much as the message.

    def receive(self, peer: int, landing: Landing, tag: int) -> Coming:
        """Posts a receive into `landing`, which may be longer than what comes."""
        try:
            return Coming(peer, landing, self._group.recv([landing.tensor], self._places[peer], tag))
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def send(self, peer: int, data: bytearray, tag: int) -> tuple[Any, torch.Tensor]:
        """Starts to send; returns what to keep until `sent`."""
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        try:
            return self._group.send([tensor], self._places[peer], tag), tensor
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def wait(self, coming: Coming) -> memoryview:
        """Waits for a message and returns its buffer.

        Raises:
            DeadlineError: it did not come in time.
            TransportError: the peer is gone.
        """
        try:
            coming.work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(coming.peer, error) from error
        return coming.landing.data

    def sent(self, sending: tuple[Any, torch.Tensor], peer: int, timeout: timedelta | None = None) -> None:
        """Waits until a message has left. Raises as `wait`."""
        try:
            sending[0].wait(timeout or self._timeout)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def part(self, timeout: timedelta) -> None:
        """Waits until every peer has called this too, or is gone, or the time is over.

        A process that ends at once takes its last words with it: the kernel resets its connections, and what the peers
        had not read yet is lost.
        """
        until = time.monotonic() + timeout.total_seconds()
        try:
            coming = [self.receive(peer, Landing(1), _PART_TAG) for peer in self.peers]
            sending = [(peer, self.send(peer, bytearray(1), _PART_TAG)) for peer in self.peers]
            for each in coming:
                each.work.wait(_left(until))
            for peer, each_sending in sending:
                self.sent(each_sending, peer, _left(until))
        except (RuntimeError, TransportError):
            return

    def _lost(self, peer: int, error: RuntimeError) -> ThinwireError:
        text = str(error).splitlines()[0][:300]
        if "timed out" in text.lower():
            return DeadlineError(
                f"rank {peer} kept rank {self.rank} waiting for more than {self._timeout.total_seconds():g} s: it has "
                f"stopped, or runs another training loop ({text})"
            )
        return TransportError(f"rank {peer} is gone, as rank {self.rank} sees it; start all ranks again ({text})")

    # ---- before training

    def agree(self, settings: dict[str, Any]) -> None:
        """Compares settings (JSON values) with those of rank 0.

        Raises:
            ProtocolError: they differ on some rank; the message names it and the setting, on every rank.
        """
        own = json.dumps(settings, sort_keys=True)
        digest = torch.frombuffer(bytearray(hashlib.blake2b(own.encode(), digest_size=32).digest()), dtype=torch.uint8)
        digests = [torch.empty_like(digest) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(digests, digest, group=self._group))
        if all(torch.equal(other, digests[0]) for other in digests):
            return
        texts = self.gather(own)
        first = json.loads(texts[0])
        for rank, text in enumerate(texts):
            other = json.loads(text)
            for key in sorted({*first, *other}):
                if first.get(key) != other.get(key):
                    raise ProtocolError(
                        f"rank {rank} has {key} = {other.get(key)!r} and rank 0 has {first.get(key)!r}; "
                        "every rank must call ddp.compress with the same model and arguments"
                    )

    def gather(self, text: str) -> list[str]:
        """Returns every rank's text, in rank order."""
        data = bytearray(text.encode())
        length = torch.tensor([len(data)])
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(lengths, length, group=self._group))
        longest = max(1, *(int(other) for other in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(parts, padded, group=self._group))
        return [bytes(part[: int(size)].numpy()).decode() for part, size in zip(parts, lengths, strict=True)]

    def measure_link(self) -> float:
        """Returns bits per second on the slowest way from a rank to the next, all ranks sending at once.

        Takes some 0.1 s: messages grow until one takes long enough to be told from the delay.
        """
        rate = 0.0
        for nbytes in _PROBE_NBYTES if self.size > 1 else ():
            out, into = bytearray(nbytes), Landing(nbytes)
            coming = self.receive((self.rank - 1) % self.size, into, _PROBE_TAG)
            self._collective(lambda: dist.barrier(group=self._group))
            begin = time.perf_counter()
            sending = self.send((self.rank + 1) % self.size, out, _PROBE_TAG)
            self.wait(coming)
            taken = torch.tensor([time.perf_counter() - begin])
            self.sent(sending, (self.rank + 1) % self.size)
            slowest = taken.clone()
            self._collective(lambda value=slowest: dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group))  # type: ignore[misc]
            rate = 8 * nbytes / float(slowest)
            if float(slowest) >= _PROBE_ENOUGH_S:
                break
        return rate

    def _collective(self, run: Callable[[], object]) -> None:
        try:
            run()
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} could not reach every rank within {self._timeout.total_seconds():g} s; all of them "
                f"must call ddp.compress: {str(error).splitlines()[0][:300]}"
            ) from error


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(0.001, until - time.monotonic()))
