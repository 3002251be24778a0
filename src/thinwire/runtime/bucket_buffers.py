"""The state of an exchange under way: the memory of its buckets, and its transfers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.codecs.decoding import Values
from thinwire.codecs.tensors import off_host, store_tensor
from thinwire.collective.exchange import Exchange, Pass
from thinwire.transports.peers import Transfer

Future = torch.futures.Future[torch.Tensor]


@dataclass(slots=True)
class BucketBuffer:
    """The memory of one bucket in one step.

    Args:
        buffer: the gradients; filled with their averages.
        ready: a CUDA event after which it may be read; None on the CPU.
        future: completes with `buffer`.
    """

    buffer: torch.Tensor
    ready: Any
    future: Future

    def values(self) -> Values:
        """Returns the values, flat, in the compute dtype and on the buffer's device; shares its memory if possible."""
        if self.ready is not None:
            self.ready.synchronize()
        buffer = self.buffer.detach().reshape(-1)
        flat = buffer.to(torch.float64 if buffer.dtype == torch.float64 else torch.float32)
        return flat if off_host(flat) else flat.numpy()

    def fill(self, values: Values, *, keeps_inf: bool = False) -> None:
        """Copies the values into the buffer, clamped to its dtype's range, unless they share its memory.

        Args:
            values: in the dtype and shape of what `values` returned.
            keeps_inf: keeps the buffer's Inf: these gradients have not been checked yet.
        """
        tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
        if self.buffer.data_ptr() == tensor.data_ptr():
            return
        infinite = self.buffer.isinf() if keeps_inf else None
        store_tensor(self.buffer, tensor, False)
        if infinite is not None:
            self.buffer.masked_fill_(infinite, torch.inf)


@dataclass(slots=True)
class UnderWay:
    """An exchange under way: its buckets, and its transfers."""

    exchange: Exchange
    buckets: list[BucketBuffer]
    values: list[Values] = field(default_factory=list)
    receives: dict[Pass, list[Transfer]] = field(default_factory=dict)
    sends: list[Transfer] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    failed: bool = False

    def tag(self, way: Pass) -> int:
        """Returns the tag of the messages of this bucket group and pass."""
        return 2 * self.exchange.bucket + way.value
