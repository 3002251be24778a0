"""The transform of tiles: an orthonormal DCT-II by its definition, undone by its inverse, under autocast too."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from thinwire.codecs.dct import dct_matrix, transform_tiles
from thinwire.codecs.tensors import FloatArray
from thinwire.kernels.numba.blocktopk import Blocks

TILES = Blocks(64, 96, 16, 32, 1, 512)


@pytest.mark.parametrize("size", [1, 2, 3, 29, 64, 256])
def test_the_matrix_is_the_orthonormal_dct(size: int) -> None:
    i, r = np.arange(size)[:, None], np.arange(size)
    wanted = math.sqrt(2 / size) * np.cos(np.pi * (2 * r + 1) * i / (2 * size))
    wanted[0] = math.sqrt(1 / size)
    matrix = dct_matrix(size, torch.float64)
    np.testing.assert_allclose(matrix.numpy(), wanted, atol=1e-12)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-14, rtol=0)


@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 3e-6), (np.float64, 1e-14)])
def test_every_tile_is_transformed_by_itself_and_back(dtype: type, error: float) -> None:
    values: FloatArray = np.random.default_rng(0).standard_normal(64 * 96).astype(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        coefficients = transform_tiles(values, TILES)
        again = transform_tiles(coefficients, TILES, inverse=True)
    assert coefficients.dtype == again.dtype == dtype
    down, across = (dct_matrix(size, torch.float64).numpy() for size in (16, 32))
    wanted = down @ values.reshape(64, 96)[16:32, 32:64] @ across.T
    np.testing.assert_allclose(coefficients.reshape(64, 96)[16:32, 32:64], wanted, atol=error)
    np.testing.assert_allclose(again, values, atol=error)
