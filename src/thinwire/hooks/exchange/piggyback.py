"""How a few bytes of every rank reach all ranks on the all-reduce of a gradient, which keeps its bits.

A tiny collective of its own wakes every rank's threads a dozen times; a small gradient is copied twice in a fraction of
that. Every rank writes its bytes into places of its own, as whole numbers that float32 holds exactly, and zeros into
those of the others: the sums are what all have written. gloo cuts a tensor into two segments for every rank, and which
rank begins a segment's sums decides their last bits. So the places go to the end of every segment, and no value of the
gradient comes into another one.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

MOST_NBYTES = 1 << 20
"""Of a gradient: to copy a larger one takes as long as a collective of its own, and gloo cuts it up otherwise."""
_SEGMENTS = 2
"""Of every rank."""
_WIDTH = 3
"""Bytes in a place: whole numbers up to 2**24 are exact."""


class _Carrier:
    """A tensor that holds a gradient of so many values, and so many places at the end of each of its segments."""

    def __init__(self, count: int, places: int, segments: int) -> None:
        length = -(-count // segments)
        self.whole = count // length
        """Segments that are full; what follows them is zeros, and stays zeros."""
        self.tensor = torch.zeros(segments, length + places, dtype=torch.float32, device="cpu")
        array = self.tensor.numpy()  # of which an operation takes a tenth of a tensor's
        self.body, self.places = array[: self.whole, :length], array[:, length:]
        self.rest = array[self.whole, : count % length] if self.whole < segments else array[0, :0]
        self.count = count

    def halves(self, gradient: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Returns a gradient's values as they lie in `body` and `rest`."""
        values = gradient.detach().numpy()
        full = self.count - len(self.rest)
        return values[:full].reshape(self.body.shape), values[full:]


class Piggyback:
    """One rank's part. `put` bytes before a step, `load` its first gradient, `unload` the average, `take` all bytes.

    Args:
        rank: this one.
        world: ranks; all of them put as many bytes at the same step.

    Example:
        >>> alone = Piggyback(0, 1)
        >>> alone.put(b"note")
        >>> alone.load(torch.arange(5.0)).shape, alone.take()
        (torch.Size([2, 4]), [b'note'])
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._data = b""
        self._loaded_nbytes = 0
        self._carriers: dict[tuple[int, int], _Carrier] = {}
        self._carrier: _Carrier | None = None
        self._work: dist.Work | None = None

    @staticmethod
    def fits(gradient: torch.Tensor) -> bool:
        """Returns whether bytes may travel with an all-reduce of a tensor like this; the same on all ranks."""
        small = gradient.dtype is torch.float32 and 0 < gradient.nbytes <= MOST_NBYTES
        return small and not gradient.is_cuda and gradient.is_contiguous()

    def put(self, data: bytes) -> None:
        """Has bytes travel with the next gradient."""
        self._data = data

    @property
    def waiting(self) -> bool:
        """Whether bytes wait for a gradient."""
        return bool(self._data)

    def load(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns what is to be all-reduced, as a sum, in place of a gradient of one dimension: it, and the bytes."""
        data, self._data = self._data, b""
        count, places = gradient.numel(), -(-len(data) // (_SEGMENTS * _WIDTH))
        carrier = self._carriers.get((count, places))
        if carrier is None:
            if any(known != count for known, _ in self._carriers):  # DDP has made its buckets anew
                self._carriers.clear()
            carrier = self._carriers[count, places] = _Carrier(count, places, _SEGMENTS * self._world)
        body, rest = carrier.halves(gradient)
        carrier.body[...], carrier.rest[...] = body, rest
        padded = data.ljust(_SEGMENTS * _WIDTH * places, b"\0")
        numbers = [int.from_bytes(padded[at : at + _WIDTH], "little") for at in range(0, len(padded), _WIDTH)]
        carrier.places[...] = 0
        begin = _SEGMENTS * self._rank
        carrier.places[begin : begin + _SEGMENTS] = np.reshape(numbers, (_SEGMENTS, places))
        self._carrier, self._loaded_nbytes = carrier, len(data)
        return carrier.tensor

    def begun(self, work: dist.Work) -> None:
        """Says what is to be waited for, should nobody else do: a backward pass may be broken off."""
        self._work = work

    def unload(self, gradient: torch.Tensor) -> None:
        """Copies the sum to the gradient that was loaded; the all-reduce has ended."""
        assert self._carrier is not None
        body, rest = self._carrier.halves(gradient)
        body[...], rest[...] = self._carrier.body, self._carrier.rest

    def take(self) -> list[bytes]:
        """Returns what all ranks have put, in rank order, once; nothing where nothing has travelled.

        What has waited for a gradient in vain waits no more: on other ranks it may have found one.

        Raises:
            RuntimeError: a rank is gone, in gloo's words.
        """
        self._data = b""
        if not self._loaded_nbytes or self._carrier is None:
            return []
        if self._work is not None:
            self._work.wait()
            self._work = None
        nbytes, self._loaded_nbytes = self._loaded_nbytes, 0
        sums = self._carrier.places.reshape(self._world, -1).tolist()
        return [b"".join(int(each).to_bytes(_WIDTH, "little") for each in own)[:nbytes] for own in sums]
