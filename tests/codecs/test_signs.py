"""`onebit`: the paper's numbers, and what it promises beyond the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.frames import Flags, Frame

V = torch.tensor([0.3, -0.4, 0.0, 1.2])


def test_onebit_scales() -> None:
    cases: list[tuple[dict[str, Any], list[float], list[int]]] = [
        ({}, [0.65, -0.65, 0.65, 0.65], [0b10110000]),
        ({"norm": "l1"}, [0.475, -0.475, 0.475, 0.475], [0b10110000]),
        ({"zeros": "keep"}, [0.750555, -0.750555, 0.0, 0.750555], [0b11010000, 0b10010000]),
        ({"norm": "l1", "zeros": "keep"}, [0.633333, -0.633333, 0.0, 0.633333], [0b11010000, 0b10010000]),
    ]
    for options, decoded, payload in cases:
        with naming(f"{options!r}"):
            frame = tw.codec("onebit", **options).encode(V)
            assert tw.decode(frame).tolist() == pytest.approx(decoded, abs=1e-6)
            assert list(tw.frames.parse(frame).payload) == payload


def test_onebit_at_the_ends_of_float64_and_a_bad_frame() -> None:
    for value in (np.finfo(np.float64).max, 5e-324):
        tensor = torch.tensor([value, -value], dtype=torch.float64)
        for norm in ("l1", "l2"):
            assert torch.equal(tw.decode(tw.codec("onebit", norm=norm).encode(tensor)), tensor)
    bad = Frame("onebit", "fp32", (3,), (1.0,), int(Flags.OPTION_A), bytes([0b01000000, 0b10000000]))
    with pytest.raises(tw.FrameError, match="both zero and positive"):
        tw.decode(tw.frames.pack(bad))
