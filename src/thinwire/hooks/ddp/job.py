"""What the pipeline works on: one bucket of DDP's, or several that travel together, in one step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from thinwire.codecs.tensors import FloatArray, off_host, store_tensor
from thinwire.hooks.ddp.exchange import Share, Values
from thinwire.hooks.ddp.mesh import Coming, Landing

PUSH, PULL = 0, 1
Use = Callable[[Share, Values, Sequence[Any]], None]


@dataclass(slots=True)
class Layout:
    """A job as it comes back step after step: the shares in its buckets, and buffers for what others send."""

    buckets: Sequence[tuple[Share, ...]]
    """Of each bucket, every rank's share."""
    rank: int
    incoming: dict[tuple[int, int], Landing] = field(init=False)

    def __post_init__(self) -> None:
        self.incoming = {}
        for peer in range(len(self.buckets[0])):
            if peer != self.rank:
                self.incoming[peer, PUSH] = Landing(self.max_nbytes(self.rank))
                self.incoming[peer, PULL] = Landing(self.max_nbytes(peer))

    def of(self, owner: int) -> list[Share]:
        """What a rank owns, by bucket."""
        return [shares[owner] for shares in self.buckets]

    def max_nbytes(self, owner: int) -> int:
        """Most bytes that a message about what `owner` owns may have."""
        return sum(share.max_nbytes for share in self.of(owner))


@dataclass(slots=True)
class Part:
    """One bucket of one step."""

    shares: tuple[Share, ...]
    buffer: torch.Tensor
    ready: Any
    """A CUDA event after which the buffer may be read; None on the CPU."""
    future: torch.futures.Future[torch.Tensor]
    values: Values = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(slots=True)
class Job:
    """Buckets that travel together, in one step."""

    step: int
    bucket: int
    """The first bucket's number."""
    last: bool
    layout: Layout
    parts: list[Part]
    done: threading.Event = field(default_factory=threading.Event)
    pushes: list[Coming] = field(default_factory=list)
    pulls: list[Coming] = field(default_factory=list)
    sending: list[tuple[int, tuple[Any, torch.Tensor]]] = field(default_factory=list)
    void: bool = False
    failed: bool = False


def by_bucket(job: Job, owner: int, frames: Sequence[Any], use: Use) -> None:
    """Hands each bucket the frames of its own share."""
    at = 0
    for part in job.parts:
        share = part.shares[owner]
        use(share, part.values, frames[at : at + share.num_frames])
        at += share.num_frames


def tag(job: Job, way: int) -> int:
    """One sequence of messages for each bucket and direction."""
    return 2 * job.bucket + way


def values_of(part: Part) -> Values:
    """The bucket's values, flat, in the compute dtype, where they lie: the bucket's own memory wherever possible."""
    if part.ready is not None:
        part.ready.synchronize()
    dtype = torch.float64 if part.shares[0].dtype == np.float64 else torch.float32
    flat = part.buffer.detach().reshape(-1).to(dtype)
    if off_host(flat):
        return flat
    values: FloatArray = flat.numpy()
    return values


def fill(buffer: torch.Tensor, values: Values) -> None:
    """Lets a bucket have its values, unless they are its own memory."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if buffer.data_ptr() != tensor.data_ptr():
        store_tensor(buffer, tensor, False)
