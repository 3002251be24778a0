"""Where tables lie in the host's memory, so that one call of a kernel takes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.kernels.numba.addresses import Addresses, subtract_many
from thinwire.kernels.numba.local_steps import Continued
from thinwire.worker.model import WorkerTensor
from thinwire.worker.table import WorkerTable

Places = Sequence[tuple[int, WorkerTable]]
"""Tables, each with the number of its tensor among those of a fragment."""


@dataclass(frozen=True, slots=True)
class Lead:
    """What replaces a share of one tensor's first moments: ``(√second · correction + eps) · change · factor``.

    The change is what an update does to the shared values, with a minus sign, less ``decay`` times what they are now.

    Args:
        first, second: of the worker's own optimizer, float32 in the host's memory, contiguous.
        correction, eps, factor, decay: see above.
    """

    first: torch.Tensor
    second: torch.Tensor
    correction: float
    eps: float
    factor: float
    decay: float


class Rows:
    """Some tables: each at its place in its tensor's arrays, whichever these are.

    Args:
        places: the tables.
        tensors: of the fragment.
    """

    def __init__(self, places: Places, tensors: Sequence[WorkerTensor]) -> None:
        self.tables = [table for _, table in places]
        self.places = [place for place, _ in places]
        self._places = np.array(self.places, np.int64)
        self._begins = np.array([4 * table.span.start for table in self.tables], np.int64)
        self.sizes = np.array([table.values.numel() for table in self.tables], np.int64)
        self.shared = self.of(addresses([tensor.values for tensor in tensors]))

    def of(self, tensors: Addresses) -> Addresses:
        """Returns where the tables lie, given where float32 arrays of all tensors do; 0 where a tensor has none."""
        given = tensors[self._places]
        return np.where(given != 0, given + self._begins, 0)

    def residuals(self) -> Addresses:
        """Returns where the tables' residuals lie; 0 where there is none."""
        return addresses([table.residual for table in self.tables])

    def subtract(self, local: Addresses, offsets: Addresses, outs: Addresses, unsent: float | None) -> list[float]:
        """See `subtract_many`; `local` and `outs` are given as for `of`, `offsets` of each table."""
        return subtract_many(self.shared, self.of(local), offsets, self.of(outs), self.sizes, unsent)

    def continued(self, local: Addresses, share: float, leads: Sequence[Lead | None], lead_share: float) -> Continued:
        """Returns where local values and moments are that go on from the tables' shared values.

        Args:
            local: of all tensors, as for `of`.
            share: of the residuals, which stays in them.
            leads: of all tensors.
            lead_share: of the first moments, which is replaced.
        """
        numbers: NDArray[np.float32] = np.array(
            [(0, 0, 0, 0) if each is None else (each.correction, each.eps, each.factor, each.decay) for each in leads],
            np.float32,
        )
        return Continued(
            self.of(local),
            self.residuals() if share else np.zeros_like(self.sizes),
            share,
            self.of(addresses([None if each is None else each.first for each in leads])),
            self.of(addresses([None if each is None else each.second for each in leads])),
            numbers[self._places],
            lead_share,
        )


def addresses(tensors: Sequence[torch.Tensor | None]) -> Addresses:
    """Returns where tensors lie; 0 for None."""
    return np.array([0 if each is None else each.data_ptr() for each in tensors], np.int64)
