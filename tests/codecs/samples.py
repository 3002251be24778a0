"""Tensors that codecs meet, and those that break careless ones. All are deterministic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tests.codecs.contract import Enrolled, Floats, exact

SIZES = (0, 1, 4, 5, 6, 63, 64, 65, 319, 1000)
"""Around the groups of five, the machine word, and a few runs of fourteen groups."""

BIG = 1_000_003

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}

STEP = {"fp32": 0.0, "fp64": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""What casting a decoded value back to the tensor's own dtype may change it by, relatively; codecs compute wider."""

SMALLEST = {"fp32": 2.0**-149, "fp64": 2.0**-1074, "fp16": 2.0**-24, "bf16": 2.0**-133}


def normal(size: int, seed: int = 1) -> Floats:
    """Standard normal values: what most papers assume of gradients."""
    return np.random.default_rng(seed).standard_normal(size)


def heavy_tails(size: int, seed: int = 2) -> Floats:
    """Cubed Student-t values: a few carry all the magnitude, as in embeddings."""
    return np.random.default_rng(seed).standard_t(3, size) ** 3 * 1e-3


def one_hot(size: int) -> Floats:
    values = np.zeros(size)
    values[size // 3 : size // 3 + 1] = -2.5
    return values


def formula(size: int, step: int = 0) -> NDArray[np.float32]:
    """Values from integer arithmetic alone: the same bits on every machine and in every NumPy to come.

    Uniform fractions in [−1, 1), cubed, so that a few are large and many small.
    """
    index = np.arange(size, dtype=np.uint64) + np.uint64(7919 * step)
    mixed = (index * np.uint64(2654435761) + np.uint64(97)) % np.uint64(2**32)
    fraction = mixed.astype(np.float64) / 2.0**31 - 1.0
    return (fraction * fraction * fraction).astype(np.float32)


CONTENTS: dict[str, Callable[[int], Floats]] = {
    "normal": normal,
    "heavy tails": heavy_tails,
    "zero": np.zeros,
    "constant": lambda size: np.full(size, 0.7),
    "negative constant": lambda size: np.full(size, -3.0),
    "one-hot": one_hot,
    "alternating": lambda size: np.where(np.arange(size) % 2, 1.0, -1.0),
    "negative zeros": lambda size: np.where(np.arange(size) % 7, -0.0, 1e-3),
}


def subnormal(size: int, dtype: str) -> torch.Tensor:
    """Multiples of the smallest number above zero."""
    steps = torch.arange(size, dtype=torch.float64) % 101 - 50
    return (steps * SMALLEST[dtype]).to(DTYPES[dtype])


def largest(size: int, dtype: str, entry: Enrolled) -> torch.Tensor:
    """± the largest number that both the dtype and the codec's claim allow, rounded towards zero."""
    top = min(float(torch.finfo(DTYPES[dtype]).max), entry.largest)
    edge = torch.tensor(top, dtype=DTYPES[dtype])
    if float(edge) > top:
        edge = torch.nextafter(edge, torch.zeros_like(edge))
    signs = torch.where(torch.arange(size) % 3 == 0, -1.0, 1.0).to(DTYPES[dtype])
    return signs * edge


def tensor(values: Floats, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float64)).to(DTYPES[dtype])


def wide(tensor: torch.Tensor) -> Floats:
    """A tensor's values as flat float64."""
    values: Floats = tensor.detach().to(torch.float64).reshape(-1).numpy()
    return values


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes: equal bits, NaN and −0.0 included."""
    same_width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(same_width).numpy().tobytes()


def assert_within_claim(entry: Enrolled, given: torch.Tensor, decoded: torch.Tensor, dtype: str) -> None:
    """The error that the codec claims, plus rounding: of float32 arithmetic, and of the cast to the tensor's dtype."""
    assert entry.error is not None
    x, got = wide(given), wide(decoded)
    claim = entry.error(x)
    scale = float(np.abs(x).max(initial=0.0))
    compute = 2.0**-50 if dtype == "fp64" else 2.0**-21
    smallest = max(SMALLEST[dtype], 0.0 if dtype == "fp64" else SMALLEST["fp32"])
    # A scale among the subnormals is itself rounded, and 127 levels multiply that.
    slack = 0.0 if entry.error is exact else compute * scale + 128 * smallest
    limit = claim + STEP[dtype] * (np.abs(x) + claim) + slack
    worst = int(np.argmax(np.abs(got - x) - limit)) if x.size else 0
    assert np.isfinite(got).all(), "a decoded value is not finite"
    assert (np.abs(got - x) <= limit).all(), f"value {worst}: {x[worst]!r} came back as {got[worst]!r}, claim {claim}"
