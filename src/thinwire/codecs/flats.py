"""Many flat tensors at once: addresses for kernels, and views for all other code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch

from thinwire.codecs.decoding import Values
from thinwire.codecs.tensors import FloatArray, off_host
from thinwire.kernels.numba.addresses import Addresses, add_to_many, gather, largest_of_many, scatter


class Flats:
    """Some flat tensors of one dtype, float32 or float64, in the host's memory or on a GPU.

    Args:
        addresses: of each tensor's first value, in the memory that holds it.
        sizes: of each tensor, in values.
        like: an array or a tensor of their dtype, in their memory.
        views: returns all tensors.
        is_mixed: whether they lie on several devices; `device` is then the first one's.

    Attributes:
        device: holds the tensors; None for the host's memory.
        is_wide: whether they are float64.
    """

    __slots__ = ("_is_mixed", "_like", "addresses", "device", "is_wide", "sizes", "views")

    def __init__(
        self,
        addresses: Addresses,
        sizes: Addresses,
        like: Values,
        views: Callable[[], Sequence[Values]],
        *,
        is_mixed: bool = False,
    ) -> None:
        self.addresses, self.sizes, self.views, self._like, self._is_mixed = addresses, sizes, views, like, is_mixed
        self.device = like.device if off_host(like) else None
        self.is_wide = like.itemsize == 8

    @classmethod
    def of(cls, tensors: Sequence[Values]) -> Self:
        """Makes the set of given tensors, each contiguous, of any shape and on any device."""
        addresses = np.array([address_of(each) for each in tensors], np.int64)
        sizes = np.array([each.size if isinstance(each, np.ndarray) else each.numel() for each in tensors], np.int64)
        is_mixed = len({each.device for each in tensors}) > 1
        return cls(
            addresses,
            sizes,
            tensors[0] if tensors else np.zeros(0, np.float32),
            lambda: [each.reshape(-1) for each in tensors],
            is_mixed=is_mixed,
        )

    def at(self, places: Sequence[int]) -> Flats:
        """Returns the tensors at some places."""
        if len(places) == self.sizes.size:
            return self
        some = list(places)

        def views() -> Sequence[Values]:
            views = self.views()
            return [views[place] for place in some]

        if self._is_mixed and some:
            return Flats.of(views())
        contiguous = bool(some) and some[-1] - some[0] == len(some) - 1
        index = slice(some[0], some[-1] + 1) if contiguous else some  # NumPy takes a slice ten times faster
        return Flats(self.addresses[index], self.sizes[index], self._like, views)

    def followed_by(self, other: Values) -> Flats:
        """Returns these tensors and one more, which lies in the same memory."""
        addresses = np.append(self.addresses, address_of(other))
        sizes = np.append(self.sizes, other.size if isinstance(other, np.ndarray) else other.numel())
        return Flats(addresses, sizes, self._like, lambda: [*self.views(), other])

    def joined(self) -> Values:
        """Returns a copy of all values, end to end, in the tensors' memory."""
        return self.gather() if self.device is None else torch.cat(self.tensors())

    def largest(self) -> list[float]:
        """Returns the largest magnitude of each tensor; NaN or Inf where a value is."""
        if not self.sizes.size:
            return []
        if self.device is None and not self.is_wide:
            return largest_of_many(self.addresses, self.sizes)
        norms = torch._foreach_norm(self.tensors(), math.inf)
        found: list[float] = torch.stack([each.to(norms[0].device) for each in norms]).tolist()  # one wait for all
        return found

    def tensors(self) -> list[torch.Tensor]:
        """Returns all of them as torch tensors."""
        return [each if isinstance(each, torch.Tensor) else torch.from_numpy(each) for each in self.views()]

    def gather(self) -> FloatArray:
        """Returns a copy of all values, end to end, in the host's memory."""
        whole: FloatArray = np.empty(int(self.sizes.sum()), np.float64 if self.is_wide else np.float32)
        if whole.size and self.device is None and not self._is_mixed:
            gather(self.addresses, self.sizes, whole)
        elif whole.size:
            tensors = self.tensors()
            whole[:] = torch.cat([each.cpu() for each in tensors] if self._is_mixed else tensors).cpu().numpy()
        return whole

    def scatter(self, whole: FloatArray, *, accumulate: bool = False) -> None:
        """Stores values that lie end to end in the host's memory, or adds them."""
        if not whole.size:
            return
        if self.device is None and not self._is_mixed:
            (add_to_many if accumulate else scatter)(whole, self.addresses, self.sizes)
            return
        flat = torch.from_numpy(whole)
        if self.device is not None and not self._is_mixed:
            flat = flat.to(self.device)  # one copy for all tensors
        outs = self.tensors()
        parts = [part.to(out.device) for part, out in zip(torch.split(flat, self.sizes.tolist()), outs, strict=True)]
        (torch._foreach_add_ if accumulate else torch._foreach_copy_)(outs, parts)


def address_of(values: Values) -> int:
    """Returns the address of flat values, in the memory that holds them."""
    return values.ctypes.data if isinstance(values, np.ndarray) else values.data_ptr()


def average(total: Values, over: int) -> None:
    """Divides a sum by a number of senders: multiplies it by the reciprocal in the sum's dtype."""
    if over > 1:
        total *= float((np.float64 if total.itemsize == 8 else np.float32)(1 / over))
