"""Three figures that no row of the codecs' table shows: the zstd stage, Huffman coding, and the first use of a process.

The zstd stage is set against the zero-order entropy of the trits, which no code of single trits can beat; Huffman
coding is timed alone, without the bins before it; the first use includes what is imported and compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import torch

from thinwire.bench.timing import Candidate, race
from thinwire.codecs import codec, decode
from thinwire.frames import parse
from thinwire.kernels.huffman_codes import code_lengths, length_limit
from thinwire.kernels.numba.huffman import decode_symbols, encode_symbols, histogram, room_nbytes

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


def zstd_stage(size: int, turns: int) -> dict[str, float]:
    """3LC of independent trits, 95 % of them zero, with and without the second stage.

    Returns:
        `encode_overhead`, the share of time that the stage adds; `size_vs_entropy`, its payload over the zero-order
        entropy of the trits; both payloads in bits a value, and seconds.
    """
    generator = np.random.default_rng(0)
    drawn = generator.standard_normal(size, dtype=np.float32)
    threshold = np.quantile(np.abs(drawn[:4_000_000]), ZERO_FRACTION)
    values = torch.from_numpy(np.clip(drawn, -2 * threshold, 2 * threshold))
    plain, staged = codec("3lc"), codec("3lc", entropy="zstd")
    contexts = plain.context(values), staged.context(values)

    def restore(which: int) -> None:
        residual = contexts[which].residual
        if residual is not None:
            residual.zero_()

    frames = plain.encode(values), staged.encode(values)
    payloads = [len(parse(frame, copy=False).payload) for frame in frames]
    entropy = _entropy(decode(frames[0]).numpy())
    seconds = race(
        [
            Candidate("plain", lambda: contexts[0].encode(values), lambda: restore(0)),
            Candidate("staged", lambda: contexts[1].encode(values), lambda: restore(1)),
        ],
        turns=turns,
    )
    return {
        "elements": size,
        "zero_fraction": ZERO_FRACTION,
        "encode_overhead": seconds["staged"] / seconds["plain"] - 1,
        "size_vs_entropy": 8 * payloads[1] / size / entropy,
        "bits_per_value": 8 * payloads[1] / size,
        "bits_per_value_without": 8 * payloads[0] / size,
        "entropy_bits": entropy,
        "seconds": seconds["staged"],
        "seconds_without": seconds["plain"],
    }


def huffman(size: int, turns: int) -> dict[str, float]:
    """Speed in 10⁹ symbols a second, for 1,024 symbols that come as a bell curve's bins do."""
    generator = np.random.default_rng(0)
    drawn = generator.standard_normal(size, dtype=np.float32) * 128 + 512
    symbols = drawn.clip(0, 1023).astype(np.uint16)
    limit = length_limit(SYMBOL_BITS)
    lengths = code_lengths(histogram(symbols, 1 << SYMBOL_BITS), limit)
    room = np.empty(room_nbytes(size, limit) + 64, np.uint8)
    streams = [bytes(stream) for stream in encode_symbols(symbols, lengths, room=room)]
    views = [memoryview(stream) for stream in streams]
    out, decode_room = np.empty(size, np.uint16), np.empty(sum(map(len, streams)) + 64, np.uint8)
    seconds = race(
        [
            Candidate("table", lambda: code_lengths(histogram(symbols, 1 << SYMBOL_BITS), limit)),
            Candidate("encode", lambda: encode_symbols(symbols, lengths, room=room)),
            Candidate("decode", lambda: decode_symbols(views, lengths, limit, room=decode_room, out=out)),
        ],
        turns=turns,
    )
    if not np.array_equal(out, symbols):
        raise AssertionError("Huffman decoding gave other symbols")  # speed of a wrong decoder is no figure
    return {
        "symbols": size,
        "bits_per_symbol": 8 * sum(map(len, streams)) / size,
        "encode_gsymbols": 1e-9 * size / seconds["encode"],
        "decode_gsymbols": 1e-9 * size / seconds["decode"],
        "table_seconds": seconds["table"],
    }


def first_use() -> dict[str, dict[str, float]]:
    """Seconds of a new process until 3LC has encoded and decoded: `cold`, with an empty cache, and then `cached`.

    Each has `torch` (its import), `thinwire` (import to context) and `first` (the first frame, kernels included).
    """
    with tempfile.TemporaryDirectory() as cache:
        return {kind: _first_use(cache) for kind in ("cold", "cached")}


def _first_use(cache: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", _FIRST_USE, cache], capture_output=True, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def _entropy(decoded: Any) -> float:
    """Zero-order entropy of the trits, in bits a value."""
    shares = np.array([np.mean(decoded < 0), np.mean(decoded == 0), np.mean(decoded > 0)])
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())
