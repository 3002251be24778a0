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


def test_double_squeeze_of_two_workers() -> None:
    """Two steps of both passes (DoubleSqueeze algorithm 1) with ℓ2 signs: what is broadcast, what stays."""
    codec = tw.codec("onebit")
    workers = [codec.context(torch.zeros(3)) for _ in range(2)]
    server = codec.context(torch.zeros(3))
    x = torch.zeros(3)
    steps = [([1.0, -2.0, 0.5], [0.0, 1.0, -1.5]), ([0.5, 0.5, 0.5], [-1.0, 0.0, 1.0])]
    broadcasts = []
    for gradients in steps:
        sent = [tw.decode(w.encode(torch.tensor(g))) for w, g in zip(workers, gradients, strict=True)]
        answer = tw.decode(server.encode((sent[0] + sent[1]) / 2))
        broadcasts.append(answer.tolist())
        x -= 0.1 * answer
    assert broadcasts[0] == pytest.approx([0.691991, -0.691991, 0.691991], abs=1e-6)
    assert broadcasts[1] == pytest.approx([-0.10756, -0.10756, -0.10756], abs=1e-6)
    residuals = [w.residual.tolist() for w in (*workers, server) if w.residual is not None]
    assert residuals[0] == pytest.approx([-0.05881, 0.05881, -0.086942], abs=1e-6)
    assert residuals[1] == pytest.approx([-0.821657, 1.178343, -0.678343], abs=1e-6)
    assert residuals[2] == pytest.approx([0.105803, -0.069025, 0.048212], abs=1e-6)
    assert x.tolist() == pytest.approx([-0.058443, 0.079955, -0.058443], abs=1e-6)


def test_onebit_at_the_ends_of_float64_and_what_it_refuses() -> None:
    for value in (np.finfo(np.float64).max, 5e-324):
        tensor = torch.tensor([value, -value], dtype=torch.float64)
        for norm in ("l1", "l2"):
            assert torch.equal(tw.decode(tw.codec("onebit", norm=norm).encode(tensor)), tensor)
    for option, wrong in (("norm", "linf"), ("zeros", "minus")):
        with pytest.raises(tw.ConfigError, match=option):
            tw.codec("onebit", **{option: wrong})
    bad = Frame("onebit", "fp32", (3,), (1.0,), int(Flags.OPTION_A), bytes([0b01000000, 0b10000000]))
    with pytest.raises(tw.FrameError, match="both zero and positive"):
        tw.decode(tw.frames.pack(bad))
