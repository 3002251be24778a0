"""Figures of codecs beside their table: small tensors, lists of tensors, the zstd stage, and first use.

The zstd stage is set against the zero-order entropy of the trits, which no code of single trits can beat; the first use
includes what is imported and compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from thinwire.codecs import codec, decode
from thinwire.frames import parse
from thinwire_lab.bench.harness import Figures
from thinwire_lab.bench.timing import Candidate, side_by_side

SMALL, SMALL_TURNS, LIST_TURNS = 10_000, 200, 9
ZERO_FRACTION = 0.95

_FIRST_USE = """
import json, os, sys, time
os.environ["NUMBA_CACHE_DIR"] = sys.argv[1]
import torch
torch.set_num_threads(1)
begin = time.perf_counter()
import thinwire as tw
values = torch.arange(10_000.0).remainder(7) - 3
context = tw.codec("3lc").context(values)
tw.decode(context.encode(values))
print(json.dumps(time.perf_counter() - begin))
"""


class Figure(Figures, frozen=True, kw_only=True):
    """What one measurement beside the table came to: values by name, seconds among them, and lines for people."""

    values: dict[str, Any]
    lines: list[list[str]]

    def row(self) -> dict[str, Any]:
        return self.values


def small_tensor(turns: int = SMALL_TURNS) -> Figure:
    """3LC on one small tensor, with its residual, through the public calls; a model has many of them."""
    values = torch.randn(SMALL, generator=torch.Generator().manual_seed(0))
    context = codec("3lc").context(values)
    frame, out = codec("3lc").encode(values), torch.zeros(SMALL)
    candidates = [
        Candidate("encode", lambda turn: context.encode(values)),
        Candidate("decode", lambda turn: decode(frame, out=out)),
    ]
    seconds = side_by_side(candidates, turns=turns, calls=10)
    lines = [[f"3lc, {SMALL:,} values: {name}", f"{1e6 * each:.1f} µs"] for name, each in seconds.items()]
    return Figure(values={"elements": SMALL, **seconds}, lines=lines)


def resnet50_sizes() -> list[int]:
    """Returns the sizes of ResNet-50's parameters (He et al. 2016, table 1).

    >>> len(resnet50_sizes()), sum(resnet50_sizes())
    (161, 25557032)
    """
    sizes, taken = [3 * 49 * 64, 64, 64], 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(count):
            layers = [(taken, width), (9 * width, width), (width, 4 * width), (taken, 4 * width)]
            for fan_in, units in layers if block == 0 else layers[:3]:
                sizes += [fan_in * units, units, units]
            taken = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def tensor_list(turns: int = LIST_TURNS) -> Figure:
    """3LC on ResNet-50's list, every tensor with its residual, by one thread and by two that share it; and memcpy."""
    generator = np.random.default_rng(0)
    tensors = [torch.from_numpy(generator.standard_normal(size, dtype=np.float32)) for size in resnet50_sizes()]
    copies = [np.empty(tensor.numel(), np.float32) for tensor in tensors]
    contexts = [codec("3lc").context(tensor) for tensor in tensors]
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].numel())
    shares: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for index in order:  # largest first onto the thread with less to do
        lighter = loads.index(min(loads))
        shares[lighter].append(index)
        loads[lighter] += tensors[index].numel()

    def encode(indices: list[int]) -> None:
        for index in indices:
            contexts[index].encode(tensors[index])

    def copy(turn: int) -> None:
        for tensor, target in zip(tensors, copies, strict=True):
            np.copyto(target, tensor.numpy())

    with ThreadPoolExecutor(2) as pool:
        candidates = [
            Candidate("one", lambda turn: encode(order)),
            Candidate("two", lambda turn: list(pool.map(encode, shares))),
            Candidate("memcpy", copy),
        ]
        seconds = side_by_side(candidates, turns=turns)
    name = f"3lc, {len(tensors)} tensors shaped like ResNet-50's"
    lines = [
        [f"{name}: encode, of memcpy", f"{seconds['memcpy'] / seconds['one']:.2f}"],
        [f"{name}: two threads", f"{seconds['one'] / seconds['two']:.2f} × one"],
    ]
    return Figure(values={"tensors": len(tensors), "elements": sum(loads), **seconds}, lines=lines)


def zstd_stage(size: int, turns: int) -> Figure:
    """3LC of independent trits, 95 % of them zero, with and without the second stage; and the trits' entropy."""
    drawn = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    threshold = np.quantile(np.abs(drawn[:4_000_000]), ZERO_FRACTION)
    values = torch.from_numpy(np.clip(drawn, -2 * threshold, 2 * threshold))
    codecs = codec("3lc"), codec("3lc", entropy="zstd")
    contexts = [each.context(values) for each in codecs]

    def restore(turn: int) -> None:
        for context in contexts:
            if context.residual is not None:
                context.residual.zero_()

    frames = [each.encode(values) for each in codecs]
    without, bits = (8 * len(parse(frame, copy=False).payload) / size for frame in frames)
    candidates = [
        Candidate("seconds_without", lambda turn: contexts[0].encode(values), restore),
        Candidate("seconds", lambda turn: contexts[1].encode(values), restore),
    ]
    seconds = side_by_side(candidates, turns=turns)
    _, counts = np.unique(np.sign(decode(frames[0]).numpy()), return_counts=True)
    entropy = float(-(counts / size * np.log2(counts / size)).sum())
    name = f"3lc with zstd, {size:,} values, {ZERO_FRACTION:.0%} zeros"
    lines = [
        [f"{name}: encode time", f"{seconds['seconds'] / seconds['seconds_without'] - 1:+.0%}"],
        [f"{name}: size over the trits' entropy", f"{bits / entropy:.2f}"],
    ]
    sizes = {"bits_per_value": bits, "bits_per_value_without": without, "entropy_bits": entropy}
    return Figure(values={"elements": size, "zero_fraction": ZERO_FRACTION, **sizes, **seconds}, lines=lines)


def first_use() -> Figure:
    """Seconds of two new processes, the first with an empty cache of kernels, the second with what the first left."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", _FIRST_USE, cache]
        cold, cached = (json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(2))
    values = {"not yet compiled": cold, "cached": cached}
    lines = [
        [f"first frame of a process after import torch, kernels {how}", f"{each:.2f} s"] for how, each in values.items()
    ]
    return Figure(values=values, lines=lines)


FIGURES: dict[str, Callable[[int, int], Figure]] = {
    "small": lambda elements, turns: small_tensor(),
    "list": lambda elements, turns: tensor_list(),
    "zstd_stage": zstd_stage,
    "first_use": lambda elements, turns: first_use(),
}
"""By name, of the CPU's kernels; each is measured with so many values and turns."""
