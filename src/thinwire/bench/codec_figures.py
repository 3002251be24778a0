"""Figures of codecs beside their table: small tensors, lists of tensors, the zstd stage, Huffman coding, first use.

The zstd stage is set against the zero-order entropy of the trits, which no code of single trits can beat; Huffman
coding is timed alone, without the bins before it; the first use includes what is imported and compiled.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.bench.harness import Figures
from thinwire.bench.timing import Candidate, side_by_side
from thinwire.codecs import codec, decode
from thinwire.frames import parse
from thinwire.kernels.huffman_codes import code_lengths, length_limit
from thinwire.kernels.numba.huffman import decode_symbols, encode_symbols, histogram, room_nbytes

SMALL = 10_000
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


class SmallTensor(Figures, frozen=True, kw_only=True):
    """Seconds of 3LC on one small tensor, with its residual, through the public calls; and of torch.add(out=)."""

    elements: int
    encode: float
    decode: float
    add: float


class TensorList(Figures, frozen=True, kw_only=True):
    """Seconds of 3LC on ResNet-50's list, by one thread and by two that share it; and of memcpy."""

    tensors: int
    elements: int
    one: float
    two: float
    memcpy: float


class ZstdStage(Figures, frozen=True, kw_only=True):
    """3LC of independent trits with and without the second stage: payload bits a value, seconds, trits' entropy."""

    elements: int
    zero_fraction: float
    bits_per_value: float
    bits_per_value_without: float
    entropy_bits: float
    seconds: float
    seconds_without: float


class Huffman(Figures, frozen=True, kw_only=True):
    """Huffman coding of 1,024 symbols that come as a bell curve's bins do; speeds in 10⁹ symbols a second."""

    symbols: int
    bits_per_symbol: float
    encode_gsymbols: float
    decode_gsymbols: float
    table_seconds: float


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a new process: torch's import, thinwire's up to a context, and the first frame, kernels included."""

    torch: float
    thinwire: float
    first: float


class FirstUse(Figures, frozen=True, kw_only=True):
    """A new process with an empty cache of kernels, and with a filled one."""

    cold: Start
    cached: Start


def resnet50_sizes() -> list[int]:
    """The sizes of ResNet-50's 161 parameters, in order (He et al. 2016, table 1).

    Example:
        >>> len(resnet50_sizes()), sum(resnet50_sizes())
        (161, 25557032)
    """
    sizes, channels = [3 * 64 * 7 * 7, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for taken, given, kernel in ((channels, width, 1), (width, width, 3), (width, 4 * width, 1)):
                sizes += [taken * given * kernel * kernel, given, given]
            if block == 0:
                sizes += [channels * 4 * width, 4 * width, 4 * width]
            channels = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def small_tensor(turns: int = 200) -> SmallTensor:
    """Microseconds matter here: a model has many small tensors."""
    values = torch.randn(SMALL, generator=torch.Generator().manual_seed(0))
    context = codec("3lc").context(values)
    frame, out = codec("3lc").encode(values), torch.zeros(SMALL)
    seconds = side_by_side(
        [
            Candidate("encode", lambda: context.encode(values)),
            Candidate("decode", lambda: decode(frame, out=out)),
            Candidate("add", lambda: torch.add(values, out, out=out)),
        ],
        turns=turns,
        calls=10,
    )
    return SmallTensor(elements=SMALL, **seconds)


def tensor_list(turns: int = 9) -> TensorList:
    """Every tensor encoded with its residual."""
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

    def copy() -> None:
        for tensor, target in zip(tensors, copies, strict=True):
            np.copyto(target, tensor.numpy())

    with ThreadPoolExecutor(2) as pool:
        seconds = side_by_side(
            [
                Candidate("one", lambda: encode(order)),
                Candidate("two", lambda: list(pool.map(encode, shares))),
                Candidate("memcpy", copy),
            ],
            turns=turns,
        )
    return TensorList(tensors=len(tensors), elements=sum(tensor.numel() for tensor in tensors), **seconds)


def zstd_stage(size: int, turns: int) -> ZstdStage:
    """95 % of the trits are zero."""
    drawn = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    threshold = np.quantile(np.abs(drawn[:4_000_000]), ZERO_FRACTION)
    values = torch.from_numpy(np.clip(drawn, -2 * threshold, 2 * threshold))
    plain, staged = codec("3lc"), codec("3lc", entropy="zstd")
    contexts = plain.context(values), staged.context(values)

    def restore(which: int) -> None:
        residual = contexts[which].residual
        if residual is not None:
            residual.zero_()

    frames = plain.encode(values), staged.encode(values)
    bits = [8 * len(parse(frame, copy=False).payload) / size for frame in frames]
    seconds = side_by_side(
        [
            Candidate("plain", lambda: contexts[0].encode(values), lambda: restore(0)),
            Candidate("staged", lambda: contexts[1].encode(values), lambda: restore(1)),
        ],
        turns=turns,
    )
    return ZstdStage(
        elements=size,
        zero_fraction=ZERO_FRACTION,
        bits_per_value=bits[1],
        bits_per_value_without=bits[0],
        entropy_bits=_entropy(decode(frames[0]).numpy()),
        seconds=seconds["staged"],
        seconds_without=seconds["plain"],
    )


def huffman(size: int, turns: int) -> Huffman:
    """Encodes and decodes, and checks that what came out is what went in."""
    drawn = np.random.default_rng(0).standard_normal(size, dtype=np.float32) * 128 + 512
    symbols = drawn.clip(0, 1023).astype(np.uint16)
    limit = length_limit(SYMBOL_BITS)
    lengths = code_lengths(histogram(symbols, 1 << SYMBOL_BITS), limit)
    room = np.empty(room_nbytes(size, limit) + 64, np.uint8)
    streams = [bytes(stream) for stream in encode_symbols(symbols, lengths, room=room)]
    views = [memoryview(stream) for stream in streams]
    out, decode_room = np.empty(size, np.uint16), np.empty(sum(map(len, streams)) + 64, np.uint8)
    seconds = side_by_side(
        [
            Candidate("table", lambda: code_lengths(histogram(symbols, 1 << SYMBOL_BITS), limit)),
            Candidate("encode", lambda: encode_symbols(symbols, lengths, room=room)),
            Candidate("decode", lambda: decode_symbols(views, lengths, limit, room=decode_room, out=out)),
        ],
        turns=turns,
    )
    if not np.array_equal(out, symbols):
        raise AssertionError("Huffman decoding gave other symbols")  # speed of a wrong decoder is no figure
    return Huffman(
        symbols=size,
        bits_per_symbol=8 * sum(map(len, streams)) / size,
        encode_gsymbols=1e-9 * size / seconds["encode"],
        decode_gsymbols=1e-9 * size / seconds["decode"],
        table_seconds=seconds["table"],
    )


def first_use() -> FirstUse:
    """Starts two processes, one after the other, with one cache."""
    with tempfile.TemporaryDirectory() as cache:

        def start() -> Start:
            command = [sys.executable, "-c", _FIRST_USE, cache]
            return msgspec.json.decode(subprocess.run(command, capture_output=True, check=True).stdout, type=Start)

        return FirstUse(cold=start(), cached=start())


def _entropy(decoded: NDArray[np.float32]) -> float:
    """Zero-order entropy of the trits, in bits a value."""
    shares = np.array([np.mean(decoded < 0), np.mean(decoded == 0), np.mean(decoded > 0)])
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


FIGURES: dict[str, Callable[[int, int], Figures]] = {
    "small": lambda elements, turns: small_tensor(),
    "list": lambda elements, turns: tensor_list(),
    "zstd_stage": zstd_stage,
    "huffman": huffman,
    "first_use": lambda elements, turns: first_use(),
}
"""By name; each is measured with so many values and turns."""
KINDS = (SmallTensor, TensorList, ZstdStage, Huffman, FirstUse)


def describe(figures: Figures) -> list[list[str]]:
    """Returns lines of a figure, its measured value and the bar that it is held against."""
    match figures:
        case SmallTensor(elements=elements, encode=encode, decode=decode, add=add):
            values = f"3lc, {elements:,} values"
            return [
                [f"{values}: encode", f"{1e6 * encode:.1f} µs", ""],
                [f"{values}: decode", f"{1e6 * decode:.1f} µs", ""],
                [f"{values}: encode in torch.add(out=)", f"{encode / add:.1f}", "≤ 10"],
            ]
        case TensorList(tensors=count, one=one, two=two, memcpy=memcpy):
            tensors = f"3lc, {count} tensors shaped like ResNet-50's"
            return [
                [f"{tensors}: encode, of memcpy", f"{memcpy / one:.2f}", "≥ 0.40"],
                [f"{tensors}: two threads", f"{one / two:.2f} × one", "≥ 1.35"],
            ]
        case ZstdStage() as stage:
            zstd = f"3lc with zstd, {stage.elements:,} values, {stage.zero_fraction:.0%} zeros"
            over = f"{stage.bits_per_value / stage.entropy_bits:.2f}"
            return [
                [f"{zstd}: encode time", f"{stage.seconds / stage.seconds_without - 1:+.0%}", "≤ +40 %"],
                [f"{zstd}: size over the trits' entropy", over, "≤ 1.20"],
            ]
        case Huffman(bits_per_symbol=bits, encode_gsymbols=encode, decode_gsymbols=decode):
            symbols = f"Huffman, 1,024 symbols, {bits:.2f} bits each"
            return [
                [f"{symbols}: encode", f"{encode:.2f} G symbols/s", "≥ 1"],
                [f"{symbols}: decode", f"{decode:.2f} G symbols/s", "≥ 0.7"],
            ]
        case FirstUse(cold=cold, cached=cached):
            first = "first frame of a process after import torch, kernels"
            return [
                [f"{first} not yet compiled", f"{cold.thinwire + cold.first:.2f} s", "≤ 6 s"],
                [f"{first} cached", f"{cached.thinwire + cached.first:.2f} s", "≤ 0.6 s"],
            ]
    return []
