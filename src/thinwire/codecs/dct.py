"""The orthonormal DCT-II of a matrix's tiles, as two products with its matrix; DeMo sends the largest coefficients."""

from __future__ import annotations

import math
from functools import cache

import torch

from thinwire.codecs.tensors import FloatArray
from thinwire.kernels.numba.positions import Blocks


@cache
def dct_matrix(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrix of the DCT-II: row i is √(2/n)·cos(π(2r + 1)i/2n), and √(1/n) where i is 0.

    Example:
        >>> dct_matrix(2, torch.float64).numpy().round(6).tolist()
        [[0.707107, 0.707107], [0.707107, -0.707107]]
    """
    i, r = torch.arange(size, device="cpu")[:, None], torch.arange(size, device="cpu")
    quarters = (2 * r + 1) * i % (4 * size)
    matrix = math.sqrt(2 / size) * torch.cos(quarters.double() * (math.pi / (2 * size)))
    matrix[0] = math.sqrt(1 / size)
    return matrix.to(dtype)


def transform_tiles(values: FloatArray, blocks: Blocks, *, inverse: bool = False) -> FloatArray:
    """Returns the coefficients of every tile, each in the place of its tile's values, in new memory.

    Args:
        values: float32[n] or float64[n], finite.
        blocks: the tiles of n values; none is short.
        inverse: turns coefficients into values.

    Example:
        >>> import numpy as np
        >>> transform_tiles(np.array([1.0, 2, 3, 5]), Blocks(2, 2, 2, 2, 1, 4)).round(6).tolist()
        [5.5, -1.5, -2.5, 0.5]
    """
    tensor = torch.from_numpy(values)
    down, across = (dct_matrix(size, tensor.dtype) for size in (blocks.tile_rows, blocks.tile_columns))
    if inverse:
        down, across = down.T, across.T
    with torch.autocast("cpu", enabled=False):  # bfloat16 would round away values that the residual keeps
        columns = down @ tensor.view(-1, blocks.tile_rows, blocks.columns)
        rows = columns.view(-1, blocks.tile_columns) @ across.T
    found: FloatArray = rows.view(-1).numpy()
    return found
