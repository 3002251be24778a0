"""Packing trits: equal to the reference, and undone by unpacking."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.kernels import reference
from thinwire.kernels.numba import Workspace, pack_base243, unpack_base243

WORKSPACE = Workspace()


@pytest.mark.parametrize("layout", ["stride", "partition"])
@pytest.mark.parametrize("pad", [0, 1])
def test_packing_equals_the_reference_and_round_trips(layout: str, pad: int) -> None:
    rng = np.random.default_rng(1)
    for size in [*range(24), 319, 4096, 20_479, 20_480, 20_481, 100_003]:
        trits = rng.integers(-1, 2, size).astype(np.int8)
        codes = pack_base243(trits, layout=layout, pad=pad, workspace=WORKSPACE)
        wanted = reference.pack_base243(trits, layout=layout, pad=pad, workspace=WORKSPACE)
        assert np.array_equal(codes, wanted)
        out = np.full(size, 5, dtype=np.int8)
        assert unpack_base243(codes, out=out, layout=layout, workspace=WORKSPACE) is out
        assert np.array_equal(out, trits)
