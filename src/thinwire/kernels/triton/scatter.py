"""Values to their places in a tensor: how what `select` sent is decoded on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from thinwire.kernels.triton.dense import put
from thinwire.kernels.triton.workspace import DeviceWorkspace

_BLOCK = 1024  # values per program


def scatter(
    positions: NDArray[np.int64],
    values: NDArray[Any],
    *,
    out: torch.Tensor,
    accumulate: bool = False,
    workspace: DeviceWorkspace,
) -> None:
    """Writes (or adds) values at ascending positions of flat `out`, which is else filled with zeros; does not wait.

    Args:
        positions: below out's size; the caller has checked them.
        values: in the type of `out`.
    """
    narrow = positions.astype(np.int32) if out.numel() < 1 << 31 else positions
    workspace.follow()
    with workspace.running():
        if not accumulate:
            out.zero_()
        if positions.size:
            _scatter[(-(-positions.size // _BLOCK),)](
                workspace.upload("scatter.positions", narrow),
                workspace.upload("scatter.values", values),
                out,
                positions.size,
                ACCUMULATE=accumulate,
                BLOCK=_BLOCK,
            )
    workspace.join()


@triton.jit
def _scatter(
    positions: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < count
    position = tl.load(positions + at, mask=known, other=0)
    value = tl.load(values + at, mask=known, other=0.0)
    put(out, position, value, known, ACCUMULATE)
