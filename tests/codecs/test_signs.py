"""`onebit` and `mqe1`: the papers' numbers, and what each promises beyond the contract."""

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


def test_mqe1_of_the_worked_example() -> None:
    v = torch.tensor([0.5, -0.2, 0.0, -0.6, 0.1])
    context = tw.codec("mqe1").context(v)
    frame = context.encode(v)
    parsed = tw.frames.parse(frame)
    assert list(parsed.payload) == [168]
    assert parsed.scales == pytest.approx((-0.4, 0.2))
    assert tw.decode(frame).tolist() == pytest.approx([0.2, -0.4, 0.2, -0.4, 0.2])
    assert context.residual is not None
    assert context.residual.tolist() == pytest.approx([0.3, 0.2, -0.2, -0.2, -0.1])
    negative = v < 0
    assert float(context.residual[negative].sum()) == pytest.approx(0, abs=1e-7)
    assert float(context.residual[~negative].sum()) == pytest.approx(0, abs=1e-7)


def test_mqe1_of_a_constant_is_exact() -> None:
    cases: list[float] = [0.0, 1.0, -1.0]
    for value in cases:
        with naming(f"value={value!r}"):
            tensor = torch.full((3,), value)
            assert torch.equal(tw.decode(tw.codec("mqe1").encode(tensor)), tensor)


def test_mqe1_takes_means_along_an_axis() -> None:
    cases: list[int] = [0, 1, 2, -1]
    for axis in cases:
        with naming(f"axis={axis!r}"):
            tensor = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 5, 6)).astype(np.float32))
            decoded = tw.decode(tw.codec("mqe1", axis=axis).encode(tensor))
            alone = tw.codec("mqe1")
            for index in range(tensor.shape[axis]):
                part = tensor.select(axis, index)
                assert torch.allclose(decoded.select(axis, index), tw.decode(alone.encode(part)), rtol=1e-6, atol=0)


def test_mqe1_gives_tensors_without_the_axis_one_pair() -> None:
    bias = torch.tensor([1.0, -2.0, 3.0])
    frame = tw.codec("mqe1", axis=1).encode(bias)
    assert frame == tw.codec("mqe1").encode(bias)


def test_mqe1_refuses_what_is_no_axis() -> None:
    cases: list[Any] = [1.0, "columns", True, 32, -33]
    for axis in cases:
        with naming(f"axis={axis!r}"), pytest.raises(tw.ConfigError, match="allowed are None"):
            tw.codec("mqe1", axis=axis)


def test_mqe1_refuses_means_that_no_encoder_sends() -> None:
    cases: list[tuple[Frame, str]] = [
        (Frame("mqe1", "fp32", (3,), (0.5, 1.0), 0, b"\0"), "positive"),
        (Frame("mqe1", "fp32", (3,), (-0.5, -1.0), 0, b"\0"), "positive"),
        (Frame("mqe1", "fp32", (3,), (-0.5,), 0, b"\0"), "2 means"),
        (Frame("mqe1", "fp32", (3,), (-0.5, 1.0), int(Flags.OPTION_A), b"\1\0"), "dimension 1"),
        (Frame("mqe1", "fp32", (3,), (-0.5, 1.0), int(Flags.OPTION_A), b"\0\0"), "6 means"),
    ]
    for frame, message in cases:
        with naming(f"frame={frame!r}, message={message!r}"), pytest.raises(tw.FrameError, match=message):
            tw.decode(tw.frames.pack(frame))
