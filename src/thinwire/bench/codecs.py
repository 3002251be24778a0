"""How fast a codec is, beside what the machine can do at all and beside what a user would write.

The limits, on the same thread in the same run: memcpy; the two passes that any encoder with a residual must make
(`r += g`, then `r = f(r)`: 20 bytes a value); in-place read-modify-write; and for each codec the time in which memcpy
would move its own traffic: 8 bytes a value for two reading passes, 20 with a residual, and the payload. Times are of
the public calls, so they include the frame and its checksum. GB/s are of the float32 values that go in or come out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.bench import codec_peers, torch_ternary
from thinwire.bench.timing import Candidate, race
from thinwire.codecs import Context, decode
from thinwire.codecs.base import Codec
from thinwire.frames import parse
from thinwire.jobs.results import machine
from thinwire.kernels.numba import limits
from thinwire.policies.designs import codec_by_name

ZERO_FRACTIONS = (0.6, 0.8, 0.9, 0.95, 0.99, 0.999)
SIZES = (25_600_000, 1_000_000)
BLOCK = 4096
SLOW_TURNS = 3

Floats = NDArray[np.float32]


def bench(
    codecs: Sequence[str],
    *,
    sizes: Sequence[int] = SIZES,
    zero_fractions: Sequence[float] = ZERO_FRACTIONS,
    turns: int = 9,
    peers: Sequence[codec_peers.Peer] = (),
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Measures codecs and returns `{"machine": …, "rows": […]}`.

    Args:
        codecs: ids with options in brackets, as in `3lc[entropy=zstd]`.
        sizes: numbers of values.
        zero_fractions: shares of the values that 3LC quantises to zero; data are made for each. Codecs that zero runs
            mean nothing to are measured at one of them alone.
        turns: timed turns of each candidate; medians are reported.
        peers: general compressors, which get the bytes of the same gradients.
        on_row: hears each row as it is measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # to be removed from torch one day
    rows = []
    try:
        for size in sizes:
            arrays = _Arrays(size)
            for fraction in zero_fractions:
                arrays.fill(fraction)
                for name in codecs:
                    if (fraction, name) in cells(codecs, zero_fractions):
                        row = _measure(name, arrays, fraction, turns)
                        rows.append(row)
                        on_row(row)
                if fraction == usual_fraction(zero_fractions):
                    for peer in peers:
                        values = arrays.gradient
                        row = codec_peers.measure(peer, values, zero_fraction=fraction, turns=min(turns, SLOW_TURNS))
                        rows.append(row)
                        on_row(row)
        facts = machine()
    finally:
        torch.set_num_threads(threads)
    return {"machine": facts, "rows": rows}


def cells(codecs: Sequence[str], zero_fractions: Sequence[float]) -> list[tuple[float, str]]:
    """Which codecs are measured at which share of zeros."""
    usual = usual_fraction(zero_fractions)
    return [
        (fraction, name)
        for fraction in zero_fractions
        for name in codecs
        if codec_by_name(name).id == "3lc" or fraction == usual
    ]


def usual_fraction(zero_fractions: Sequence[float]) -> float:
    """The share of zeros at which everything is measured that does not depend on it."""
    return 0.9 if 0.9 in zero_fractions else zero_fractions[0]


def draw(size: int, zero_fraction: float, seed: int = 0) -> tuple[Floats, Floats]:
    """Returns a gradient and a residual whose sum quantises, at s = 1, to about this share of zeros.

    Normal values with a log-normal scale per block of 4,096, as layers have, clipped at twice the quantile.
    """
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(size, dtype=np.float32)
    scales = np.exp(0.5 * generator.standard_normal(-(-size // BLOCK), dtype=np.float32))
    values *= np.repeat(scales, BLOCK)[:size]
    threshold = np.quantile(np.abs(values[: min(size, 4_000_000)]), zero_fraction)
    np.clip(values, -2 * threshold, 2 * threshold, out=values)
    residual = values * generator.uniform(0.2, 0.8, size).astype(np.float32)
    return values - residual, residual


class _Arrays:
    """What all measurements of one size work on, allocated once.

    Whether a large array gets huge pages is luck, and worth a fifth: rows that are to be compared must share it.
    """

    def __init__(self, size: int) -> None:
        self.gradient: Floats = np.zeros(size, np.float32)
        self.residual: Floats = np.zeros(size, np.float32)
        self.other: Floats = np.zeros(size, np.float32)
        self.scratch: Floats = np.zeros(size, np.float32)
        self.out = torch.from_numpy(np.zeros(size, np.float32))
        self.plain_residual = torch.from_numpy(np.zeros(size, np.float32))
        self._contexts: dict[str, Context] = {}

    def fill(self, zero_fraction: float) -> None:
        """Draws data with this share of zeros."""
        self.gradient[:], self.residual[:] = draw(self.gradient.size, zero_fraction)

    def context(self, name: str) -> Context:
        """The context of a codec, the same one for every share of zeros."""
        if name not in self._contexts:
            self._contexts[name] = codec_by_name(name).context(torch.from_numpy(self.gradient))
        return self._contexts[name]


def _measure(name: str, arrays: _Arrays, zero_fraction: float, turns: int) -> dict[str, Any]:
    codec = codec_by_name(name)
    gradient, residual, size = arrays.gradient, arrays.residual, arrays.gradient.size
    values = torch.from_numpy(gradient)
    context = arrays.context(name)
    frame = codec.encode(torch.from_numpy(gradient + residual))
    out, other, scratch, plain_residual = arrays.out, arrays.other, arrays.scratch, arrays.plain_residual

    def restore() -> None:
        if context.residual is not None:
            context.residual.copy_(torch.from_numpy(residual))

    candidates = [
        Candidate("encode", lambda: context.encode(values), restore),
        Candidate("decode", lambda: decode(frame, out=out)),
        Candidate("accumulate", lambda: decode(frame, out=out, accumulate=True)),
        Candidate("memcpy", lambda: np.copyto(other, gradient)),
        Candidate("floor", lambda: limits.two_pass_floor(gradient, scratch), lambda: np.copyto(scratch, residual)),
        Candidate("rmw", lambda: limits.read_modify_write(scratch)),
        Candidate("quantize", lambda: quantize_per_tensor(values), turns=min(turns, SLOW_TURNS)),
    ]
    plain = _plain_torch(codec, values, plain_residual)
    if plain is not None:
        candidates.append(
            Candidate(
                "torch",
                plain,
                lambda: plain_residual.copy_(torch.from_numpy(residual)),
                turns=min(turns, SLOW_TURNS),
            )
        )
    calls = max(1, 2_000_000 // size) if context.residual is None else 1
    seconds = race(candidates, turns=turns if size > 4_000_000 else 4 * turns, calls=calls)
    payload = len(parse(frame, copy=False).payload)
    traffic = (8 if context.residual is None else 20) + payload / size
    row: dict[str, Any] = {
        "codec": name,
        "elements": size,
        "zero_fraction": zero_fraction,
        "bits_per_value": 8 * payload / size,
        "encode_gbps": 4e-9 * size / seconds["encode"],
        "decode_gbps": 4e-9 * size / seconds["decode"],
        "encode_vs_floor": seconds["floor"] / seconds["encode"],
        "encode_vs_traffic": seconds["memcpy"] * traffic / 8 / seconds["encode"],
        "encode_vs_torch": seconds["torch"] / seconds["encode"] if "torch" in seconds else None,
        "encode_vs_quantize": seconds["quantize"] / seconds["encode"],
        "decode_vs_memcpy": seconds["memcpy"] / seconds["decode"],
        "accumulate_vs_rmw": seconds["rmw"] / seconds["accumulate"],
        "seconds": seconds,
    }
    return row


def quantize_per_tensor(values: torch.Tensor) -> torch.Tensor:
    """What stock torch offers: 8 bits a value, no residual."""
    scale = float(values.abs().max()) / 127
    return torch.quantize_per_tensor(values, scale, 0, torch.qint8)


def _plain_torch(codec: Codec, values: torch.Tensor, residual: torch.Tensor) -> Callable[[], Any] | None:
    """The same scheme in plain torch operators, where there is an obvious way to write it."""
    match codec.id:
        case "3lc":
            return lambda: torch_ternary.encode(values, residual, 1.0)
        case "topk":
            count = max(1, values.numel() // 100)

            def select() -> torch.Tensor:
                residual.add_(values)
                indices = residual.abs().topk(count).indices.sort().values
                chosen = residual[indices]
                residual[indices] = 0
                return chosen

            return select
        case "int8":
            return lambda: quantize_per_tensor(values).int_repr()
        case "fp16":
            return lambda: values.to(torch.float16)
        case "bf16":
            return lambda: values.to(torch.bfloat16)
        case _:
            return None
