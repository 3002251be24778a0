"""`entropy`: N by the layer's entropy, payloads without Huffman codes, and invalid frames."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.frames import Flags, Frame
from thinwire.frames.layout import pack_varint

HUFFMAN = int(Flags.OPTION_A)


def weights(size: int, scale: float = 0.05) -> torch.Tensor:
    """Laplace weights with a few far outliers, as trained layers have."""
    values = np.random.default_rng(size).laplace(0, scale, size)
    values[:2] = [-1.0, 1.0]
    return torch.from_numpy(values.astype(np.float32))


def num_bits(frame: bytes) -> int:
    return tw.frames.parse(frame).payload[0]


def test_the_worked_example_in_two_bits() -> None:
    w = torch.tensor([-1.0, -0.5, -0.25, 0.0, 0.1, 0.25, 0.5, 1.0])
    frame = tw.codec("entropy", mode="fixed", bits=2).encode(w)
    parsed = tw.frames.parse(frame)
    assert (parsed.scales, bytes(parsed.payload)) == ((-1.0, 1.0), bytes([2, 0b10010100, 0b11111010]))
    assert tw.decode(frame).tolist() == [-0.75, -0.25, -0.25, 0.25, 0.25, 0.25, 0.75, 0.75]


def test_num_bits_follows_the_entropy() -> None:
    tensor = weights(5000)
    values = tensor.double().numpy()
    counts = np.histogram(values, bins=16, range=(-1, 1))[0]
    shares = counts[counts > 0] / values.size
    entropy = float(-(shares * np.log2(shares)).sum())
    whole = {"sample": 1.0}
    for options, c in (({}, 6), ({"preset": "size"}, 5), ({"c": 2.5}, 2.5)):
        assert num_bits(tw.codec("entropy", **whole, **options).encode(tensor)) == math.ceil(entropy + c)
        rounded = tw.codec("entropy", **whole, **options, rounding="round").encode(tensor)
        assert num_bits(rounded) == round(entropy + c)
    assert num_bits(tw.codec("entropy").encode(tensor)) == math.ceil(entropy + 6), "3 % see what all weights say"


def test_payload_size_is_near_the_entropy_of_the_bins() -> None:
    tensor = weights(200_000)
    frame = tw.codec("entropy").encode(tensor)
    parsed = tw.frames.parse(frame)
    assert parsed.flags & HUFFMAN
    bins = np.unique(tw.decode(frame).numpy(), return_counts=True)[1] / tensor.numel()
    entropy = float(-(bins * np.log2(bins)).sum())
    assert entropy < parsed.bits_per_value < entropy + 0.15
    smaller = tw.frames.parse(tw.codec("entropy", preset="size").encode(tensor))
    assert smaller.bits_per_value < parsed.bits_per_value - 0.8


def test_num_bits_follows_the_gradient_rms() -> None:
    tensor = weights(5000)
    for rms in (0.0, 1.0, 3.0, 100.0):
        frame = tw.codec("entropy", mode="rms", gradient_rms=rms).encode(tensor)
        assert num_bits(frame) == math.ceil(math.log2(rms + 1) + 6)
        said = tw.codec("entropy", mode="rms").encode(tensor, rms=rms)
        assert said == frame, "what is said of the step is what the option says of all"
    own = float(tensor.double().square().mean().sqrt())
    assert num_bits(tw.codec("entropy", mode="rms", c=3).encode(tensor)) == math.ceil(math.log2(own + 1) + 3)


def test_constant_layer_is_exact() -> None:
    for size, value in product((1, 3, 4096, 20_000), (0.3, -2.0, 0.0)):
        with naming(f"{size} values {value}"):
            tensor = torch.full((size,), value)
            frame = tw.codec("entropy").encode(tensor)
            assert torch.equal(tw.decode(frame), tensor)
            assert bytes(tw.frames.parse(frame).payload) == bytes(size // 4096)
            assert torch.equal(tw.decode(frame, out=torch.ones(size), accumulate=True), tensor + 1)


# ---- lies


CODED = tw.frames.parse(tw.codec("entropy").encode(weights(5000)))
PACKED = Frame("entropy", "fp32", (4,), (-1.0, 1.0), 0, bytes([2, 0b11100100]))
CONSTANT = Frame("entropy", "fp32", (5000,), (0.5, 0.5), 0, b"\0")


def test_entropy_invalid_frames_raise_frame_error() -> None:
    cases: list[tuple[Frame, str]] = [
        (replace(PACKED, scales=(1.0, -1.0)), "smallest and the largest"),
        (replace(PACKED, scales=(1.0,)), "smallest and the largest"),
        (replace(PACKED, payload=bytes([0, 0])), "0 bits"),
        (replace(PACKED, payload=bytes([31]) + bytes(16)), "payload bytes"),
        (replace(PACKED, payload=bytes([2, 0, 0])), "of 2 bits"),
        (replace(PACKED, shape=(3,)), "padding"),
        (replace(CONSTANT, payload=b"\1"), "constant"),
        (replace(CONSTANT, payload=b"\0\0"), "constant"),
        (replace(CONSTANT, flags=HUFFMAN), "constant"),
        (replace(CONSTANT, shape=(1 << 20,)), "payload bytes"),
        (replace(CODED, payload=bytes([14]) + bytes(CODED.payload[1:])), "14 bits"),
        (replace(CODED, payload=bytes(CODED.payload[:-1])), "ends at bit"),
        (replace(CODED, payload=bytes(CODED.payload) + b"\0"), "ends at bit"),
        (replace(CODED, shape=(4999,)), "ends at bit"),
        (replace(CODED, payload=bytes([2, 2, 19]) + 3 * pack_varint(300) + bytes(700)), "streams of"),
        (replace(CODED, payload=bytes([2, 2, 17, 2, 0]) + bytes(700)), "complete code"),
    ]
    assert CODED.flags & HUFFMAN
    for good in (CODED, PACKED, CONSTANT):
        tw.decode(tw.frames.pack(good))
    for frame, message in cases:
        with naming(f"{frame!r}"):
            out = torch.full(frame.shape, 7.0)
            with pytest.raises(tw.FrameError, match=message):
                tw.decode(tw.frames.pack(frame), out=out)
            assert bool((out == 7.0).all())
