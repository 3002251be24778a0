"""Figures of codecs beside their table: small tensors, lists, the zstd stage, bounds on lags, Huffman, first use.

The zstd stage is set against the zero-order entropy of the trits, which no code of single trits can beat; Huffman
coding is timed alone, without the bins before it; the first use includes what is imported and compiled.
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
from numpy.typing import NDArray

from thinwire.codecs import codec, decode, encode_all
from thinwire.frames import parse
from thinwire.kernels.numba.huffman import (
    code_lengths,
    decode_symbols,
    encode_symbols,
    histogram,
    length_limit,
    room_nbytes,
)
from thinwire.kernels.numba.lag import EVERY
from thinwire_lab.bench.harness import Figures
from thinwire_lab.bench.inputs import resnet50_sizes
from thinwire_lab.bench.timing import Candidate, side_by_side

SMALL = 10_000
SMALL_TURNS = 200
LIST_TURNS = 9
ZERO_FRACTION = 0.95
SYMBOL_BITS = 10

_FIRST_USE = """
import json, os, sys, time
os.environ["NUMBA_CACHE_DIR"] = sys.argv[1]
begin = time.perf_counter()
import torch
torch.set_num_threads(1)
imported = time.perf_counter()
import thinwire as tw
values = torch.arange(10_000.0).remainder(7) - 3
context = tw.codec("3lc").context(values)
ready = time.perf_counter()
tw.decode(context.encode(values))
print(json.dumps({"torch": imported - begin, "thinwire": ready - imported, "first": time.perf_counter() - ready}))
"""


class Figure(Figures, frozen=True, kw_only=True):
    """What one measurement beside the table came to.

    Attributes:
        values: counts, sizes and medians in seconds, by name.
        lines: for people: what was measured, its value, and the bar that it is held against.
    """

    values: dict[str, Any]
    lines: list[list[str]]

    def row(self) -> dict[str, Any]:
        return self.values


def small_tensor(turns: int = SMALL_TURNS) -> Figure:
    """3LC on one small tensor, with its residual, through the public calls; and torch.add(out=).

    Microseconds matter here: a model has many small tensors.
    """
    values = torch.randn(SMALL, generator=torch.Generator().manual_seed(0))
    context = codec("3lc").context(values)
    frame, out = codec("3lc").encode(values), torch.zeros(SMALL)
    seconds = side_by_side(
        [
            Candidate("encode", lambda turn: context.encode(values)),
            Candidate("decode", lambda turn: decode(frame, out=out)),
            Candidate("add", lambda turn: torch.add(values, out, out=out)),
        ],
        turns=turns,
        calls=10,
    )
    name = f"3lc, {SMALL:,} values"
    lines = [
        [f"{name}: encode", f"{1e6 * seconds['encode']:.1f} µs", ""],
        [f"{name}: decode", f"{1e6 * seconds['decode']:.1f} µs", ""],
        [f"{name}: encode in torch.add(out=)", f"{seconds['encode'] / seconds['add']:.1f}", "≤ 10"],
    ]
    return Figure(values={"elements": SMALL, **seconds}, lines=lines)


def tensor_list(turns: int = LIST_TURNS) -> Figure:
    """3LC on ResNet-50's list, every tensor with its residual, by one thread and by two that share it; and memcpy."""
    generator = np.random.default_rng(0)
    tensors = [torch.from_numpy(generator.standard_normal(size, dtype=np.float32)) for size in resnet50_sizes()]
    copies = [np.empty(tensor.numel(), np.float32) for tensor in tensors]
    contexts = [codec("3lc").context(tensor) for tensor in tensors]
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].numel())
    # Largest first onto the thread with less to do.
    shares: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for index in order:
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
        [f"{name}: encode, of memcpy", f"{seconds['memcpy'] / seconds['one']:.2f}", "≥ 0.40"],
        [f"{name}: two threads", f"{seconds['one'] / seconds['two']:.2f} × one", "≥ 1.35"],
    ]
    return Figure(values={"tensors": len(tensors), "elements": sum(loads), **seconds}, lines=lines)


def zstd_stage(size: int, turns: int) -> Figure:
    """3LC of independent trits, 95 % of them zero, with and without the second stage; and the trits' entropy."""
    drawn = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    threshold = np.quantile(np.abs(drawn[:4_000_000]), ZERO_FRACTION)
    values = torch.from_numpy(np.clip(drawn, -2 * threshold, 2 * threshold))
    plain, staged = codec("3lc"), codec("3lc", entropy="zstd")
    contexts = plain.context(values), staged.context(values)

    def restore(turn: int) -> None:
        for context in contexts:
            if context.residual is not None:
                context.residual.zero_()

    frames = plain.encode(values), staged.encode(values)
    without, bits = (8 * len(parse(frame, copy=False).payload) / size for frame in frames)
    candidates = [
        Candidate("seconds_without", lambda turn: contexts[0].encode(values), restore),
        Candidate("seconds", lambda turn: contexts[1].encode(values), restore),
    ]
    seconds = side_by_side(candidates, turns=turns)
    entropy = _entropy(decode(frames[0]).numpy())
    name = f"3lc with zstd, {size:,} values, {ZERO_FRACTION:.0%} zeros"
    lines = [
        [f"{name}: encode time", f"{seconds['seconds'] / seconds['seconds_without'] - 1:+.0%}", "≤ +40 %"],
        [f"{name}: size over the trits' entropy", f"{bits / entropy:.2f}", "≤ 1.20"],
    ]
    sizes = {"bits_per_value": bits, "bits_per_value_without": without, "entropy_bits": entropy}
    return Figure(values={"elements": size, "zero_fraction": ZERO_FRACTION, **sizes, **seconds}, lines=lines)


def lag_bound(turns: int = LIST_TURNS) -> Figure:
    """3LC at s = 1 with and without a bound on the lag, which then finds s = 1 too: what measuring it costs."""
    generator = np.random.default_rng(0)
    tensors = [torch.from_numpy(generator.standard_normal(size, dtype=np.float32)) for size in resnet50_sizes()]
    plain, bounded = ([made.context(each) for each in tensors] for made in (codec("3lc"), codec("3lc", lag=5)))
    candidates = [
        Candidate("seconds_without", lambda turn: encode_all(plain, tensors)),
        Candidate("seconds", lambda turn: encode_all(bounded, tensors)),
    ]
    seconds = side_by_side(candidates, turns=turns, calls=EVERY)
    name = f"3lc with a bound on the lag, {len(tensors)} tensors shaped like ResNet-50's"
    lines = [[f"{name}: encode time", f"{seconds['seconds'] / seconds['seconds_without'] - 1:+.1%}", "≤ +1 %"]]
    return Figure(values={"tensors": len(tensors), **seconds}, lines=lines)


def huffman(size: int, turns: int) -> Figure:
    """Huffman coding of 1,024 symbols that come as a bell curve's bins do; speeds in 10⁹ symbols a second."""
    drawn = np.random.default_rng(0).standard_normal(size, dtype=np.float32) * 128 + 512
    symbols = drawn.clip(0, 1023).astype(np.uint16)
    limit = length_limit(SYMBOL_BITS)
    lengths = code_lengths(histogram(symbols, 1 << SYMBOL_BITS), limit)
    room = np.empty(room_nbytes(size, limit) + 64, np.uint8)
    streams = [bytes(stream) for stream in encode_symbols(symbols, lengths, room=room)]
    views, nbytes = [memoryview(stream) for stream in streams], sum(map(len, streams))
    out, decode_room = np.empty(size, np.uint16), np.empty(nbytes + 64, np.uint8)
    candidates = [
        Candidate("table", lambda turn: code_lengths(histogram(symbols, 1 << SYMBOL_BITS), limit)),
        Candidate("encode", lambda turn: encode_symbols(symbols, lengths, room=room)),
        Candidate("decode", lambda turn: decode_symbols(views, lengths, limit, room=decode_room, out=out)),
    ]
    seconds = side_by_side(candidates, turns=turns)
    if not np.array_equal(out, symbols):
        raise AssertionError("Huffman decoding gave other symbols")  # speed of a wrong decoder is no figure
    bits, encode, decoded = 8 * nbytes / size, 1e-9 * size / seconds["encode"], 1e-9 * size / seconds["decode"]
    name = f"Huffman, 1,024 symbols, {bits:.2f} bits each"
    lines = [
        [f"{name}: encode", f"{encode:.2f} G symbols/s", "≥ 1"],
        [f"{name}: decode", f"{decoded:.2f} G symbols/s", "≥ 0.7"],
    ]
    speeds = {"encode_gsymbols": encode, "decode_gsymbols": decoded, "table_seconds": seconds["table"]}
    return Figure(values={"symbols": size, "bits_per_symbol": bits, **speeds}, lines=lines)


def first_use() -> Figure:
    """Seconds of two new processes, the first with an empty cache of kernels, the second with what the first left."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", _FIRST_USE, cache]
        cold, cached = (json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(2))
    name = "first frame of a process after import torch, kernels"
    lines = [
        [f"{name} not yet compiled", f"{cold['thinwire'] + cold['first']:.2f} s", "≤ 6 s"],
        [f"{name} cached", f"{cached['thinwire'] + cached['first']:.2f} s", "≤ 0.6 s"],
    ]
    return Figure(values={"cold": cold, "cached": cached}, lines=lines)


def _entropy(decoded: NDArray[np.float32]) -> float:
    """Zero-order entropy of the trits, in bits a value."""
    shares = np.array([np.mean(decoded < 0), np.mean(decoded == 0), np.mean(decoded > 0)])
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


FIGURES: dict[str, Callable[[int, int], Figure]] = {
    "small": lambda elements, turns: small_tensor(),
    "list": lambda elements, turns: tensor_list(),
    "zstd_stage": zstd_stage,
    "lag": lambda elements, turns: lag_bound(),
    "huffman": huffman,
    "first_use": lambda elements, turns: first_use(),
}
"""By name, of the CPU's kernels; each is measured with so many values and turns."""
