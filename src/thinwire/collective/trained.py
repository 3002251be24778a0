"""The tensors that ranks train, and the owner of each slice of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.policies.assignment import Partition, Sized
from thinwire.policies.compression import PLAIN, Choice
from thinwire.policies.placement import Heuristic, Uniform

Partitions = Mapping[str, tuple[Partition, ...]]
"""The slices of every tensor and their owners, by name."""

PART_NUMEL = 4096
"""The fewest values of a slice: of fewer, a frame's header would be a fifth of the bytes."""
_UNCOMPRESSED_WEIGHT = 32
"""An uncompressed value counts for the placement as this many compressed ones, whatever their codec is."""


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """A trained tensor: its size, its dtype, its codecs, and its residual's device."""

    name: str
    numel: int
    dtype: torch.dtype
    choice: Choice
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shape: tuple[int, ...] = ()
    """Shape of a tensor whose codec cuts it into tiles, and which has one owner; other tensors are cut anywhere."""

    @property
    def nbytes(self) -> int:
        """Its size uncompressed, in its own dtype: a bf16 gradient takes 2 bytes a value."""
        return self.numel * self.dtype.itemsize

    @property
    def uncompressed(self) -> bool:
        """Whether it is sent uncompressed both ways, in one frame with all other such tensors."""
        return self.choice == Choice(PLAIN, PLAIN)

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def partition(tensors: Sequence[TrainedTensor], world: int) -> dict[str, tuple[Partition, ...]]:
    """Returns the slices of every tensor and their owners: `server` is the rank that averages a slice.

    Ranks own about equally many values, as long as slices of `PART_NUMEL` values allow it. The slices depend on the
    sizes and the number of ranks, their owners also on which tensors are uncompressed. Another codec or DDP's buckets,
    which DDP rebuilds after the first step, change neither: residuals must find their slices again.

    Args:
        tensors: in an order that all ranks share.
        world: number of ranks.
    """
    sized = [Sized(t.name, t.numel, t.numel * (_UNCOMPRESSED_WEIGHT if t.uncompressed else 1)) for t in tensors]
    placing = Heuristic() if any(tensor.shape for tensor in tensors) else Uniform(min_numel=PART_NUMEL)
    return dict(zip((t.name for t in tensors), placing.place(sized, world).partitions, strict=True))
