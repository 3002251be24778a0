"""Tensors that ranks average together: their shared values lie end to end, and so do their changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from thinwire.local.parameters import LocalTensor

PIECE_NBYTES = 4_000_000
"""Tensors travel together until their values have so many bytes."""


@dataclass(slots=True, eq=False)
class Piece:
    """Tensors of a fragment, a group of the outer optimizer and a device, given their memory here.

    Args:
        tensors: in this order.

    Attributes:
        shared: their shared values.
        changes: what a rank has changed, or the average of it.
    """

    tensors: list[LocalTensor]
    shared: torch.Tensor = field(init=False)
    changes: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        sizes = [each.parameter.numel() for each in self.tensors]
        device = self.tensors[0].parameter.device
        self.shared, self.changes = (torch.zeros(sum(sizes), dtype=torch.float32, device=device) for _ in range(2))
        for each, size, end in zip(self.tensors, sizes, accumulate(sizes), strict=True):
            each.values, each.change = self.shared[end - size : end], self.changes[end - size : end]

    @property
    def fragment(self) -> int:
        """With what it is exchanged."""
        return self.tensors[0].fragment

    @property
    def offsets(self) -> tuple[tuple[str, int], ...]:
        """Where each name's values begin."""
        found: dict[str, int] = {}
        for each in self.tensors:
            found.setdefault(each.travels_as, int(each.values.storage_offset()))
        return tuple(found.items())


def pieces_of(tensors: Sequence[LocalTensor]) -> Iterator[Piece]:
    """Yields consecutive tensors of one fragment, group and device; those of one name in one piece."""
    some: list[LocalTensor] = []
    for tensor in sorted(tensors, key=lambda each: (each.fragment, each.group, str(each.parameter.device))):
        full = 4 * sum(each.parameter.numel() for each in some) >= PIECE_NBYTES
        if some and (
            (full and tensor.travels_as != some[-1].travels_as)
            or (tensor.fragment, tensor.group) != (some[0].fragment, some[0].group)
            or tensor.parameter.device != some[0].parameter.device
        ):
            yield Piece(some)
            some = []
        some.append(tensor)
    if some:
        yield Piece(some)
