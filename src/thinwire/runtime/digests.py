"""A digest of tensors' bits, which shows whether two workers, or a model and a state, have equal tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash


def bits_digest(tensors: Iterable[torch.Tensor]) -> str:
    """Returns a digest of tensors' bits, in this order; the tensors may have any shapes, dtypes and devices.

    >>> same = bits_digest([torch.zeros(2, 2)]) == bits_digest([torch.zeros(4)])
    >>> same, bits_digest([torch.zeros(1)]) == bits_digest([-torch.zeros(1)]), len(bits_digest([torch.zeros(0)]))
    (True, False, 16)
    """
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
