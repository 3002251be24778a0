"""What a worker does with its parameters and momenta at an exchange, each value touched once.

Torch does the same by several calls, each of which takes every value from memory and puts it back; the bits are the
same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.contract import Floats
from thinwire.kernels.numba.addresses import ONE, Addresses, array_at
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors


def keep_unsent_many(
    shared: Addresses, residuals: Addresses, share: float, local: Addresses, offsets: Addresses, sizes: Addresses
) -> None:
    """Fills local with ``shared - share * residual``, and offsets with ``shared - local``.

    Arrays are float32, given by their addresses as in `addresses`; a residual of address 0 is none.

    Example:
        >>> shared, unsent = np.array([1, 2], np.float32), np.array([0.5, -1], np.float32)
        >>> local, offset = np.empty((2, 2), np.float32)
        >>> first, *others = (np.array([each.ctypes.data]) for each in (shared, unsent, local, offset))
        >>> keep_unsent_many(first, others[0], 1.0, others[1], others[2], np.array([2]))
        >>> local.tolist(), offset.tolist()
        ([0.5, 3.0], [0.5, -1.0])
    """
    _keep_unsent_many(shared, residuals, np.float32(share), local, offsets, sizes)


def lead(before: Floats, shared: Floats, roots: Floats, correction: float, eps: float, factor: float) -> None:
    """Overwrites before with ``(roots * correction + eps) * (before - shared) * factor``, all of it float32.

    Example:
        >>> before, shared, roots = np.float32([[3], [1], [2]])
        >>> lead(before, shared, roots, 0.5, 1.0, 10.0)
        >>> before.tolist()
        [40.0]
    """
    _lead(before, frozen(shared), frozen(roots), np.float32(correction), np.float32(eps), np.float32(factor))


@jit
def _keep_unsent_many(shared: Any, residuals: Any, share: Any, local: Any, offsets: Any, sizes: Any) -> None:
    for i in range(shared.size):
        mine, ours, offset = (
            array_at(shared[i], sizes[i], ONE),
            array_at(local[i], sizes[i], ONE),
            array_at(offsets[i], sizes[i], ONE),
        )
        if residuals[i]:
            _keep_unsent(mine, array_at(residuals[i], sizes[i], ONE), share, ours, offset)
        else:
            ours[:] = mine
            offset[:] = mine - mine


@jit
def _keep_unsent(shared: Any, residual: Any, share: Any, local: Any, offset: Any) -> None:
    wide_vectors()
    for i in range(shared.size):
        value = shared[i] - residual[i] * share
        local[i] = value
        offset[i] = shared[i] - value


@jit
def _lead(before: Any, shared: Any, roots: Any, correction: Any, eps: Any, factor: Any) -> None:
    wide_vectors()
    for i in range(before.size):
        before[i] = (roots[i] * correction + eps) * (before[i] - shared[i]) * factor
