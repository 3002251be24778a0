"""Unpacking trits: what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.errors import FrameError
from thinwire.kernels import numba as kernels
from thinwire.kernels import reference
from thinwire.kernels.numba import Workspace

WORKSPACE = Workspace()


def test_unpacking_refuses_bad_codes_and_touches_nothing() -> None:
    out = np.full(6, 5, dtype=np.int8)
    for impl in (kernels, reference):
        for codes, match in (([121], "shape asks for 2"), ([121, 243], "byte 243 among"), ([0] * 3, "asks for 2")):
            with pytest.raises(FrameError, match=match):
                impl.unpack_base243(np.array(codes, dtype=np.uint8), out=out, workspace=WORKSPACE)
    assert out.tolist() == [5] * 6
