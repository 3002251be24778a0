"""How fast a codec is, beside what the machine can do at all and beside what a user would write.

The limits, on the same thread in the same run: memcpy; the two passes that any encoder with a residual must make
(`r += g`, then `r = f(r)`: 20 bytes a value); in-place read-modify-write. Times are of the public calls, so they
include the frame and its checksum. GB/s are of the float32 values that go in or come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs import codec as make_codec
from thinwire.codecs import decode
from thinwire.codecs.base import Codec
from thinwire.frames import parse
from thinwire.kernels import limits
from thinwire.studies import torch_ternary
from thinwire.studies.timing import Candidate, machine, race

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
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Measures codecs and returns `{"machine": …, "rows": […]}`.

    Args:
        codecs: ids, options in brackets not needed: the defaults are measured.
        sizes: numbers of values.
        zero_fractions: shares of the values that 3LC quantises to zero; data are made for each.
        turns: timed turns of each candidate; medians are reported.
        on_row: hears each row as it is measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for size in sizes:
            for fraction in zero_fractions:
                gradient, residual = draw(size, fraction)
                for codec_id in codecs:
                    row = _measure(make_codec(codec_id), gradient, residual, fraction, turns)
                    rows.append(row)
                    on_row(row)
        facts = machine()
    finally:
        torch.set_num_threads(threads)
    return {"machine": facts, "rows": rows}


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


def _measure(codec: Codec, gradient: Floats, residual: Floats, zero_fraction: float, turns: int) -> dict[str, Any]:
    size = gradient.size
    values = torch.from_numpy(gradient)
    context = codec.context(values)
    frame = codec.encode(torch.from_numpy(gradient + residual))
    out = torch.zeros(size)
    other = np.empty_like(gradient)
    scratch = np.zeros_like(gradient)
    plain_residual = torch.zeros(size)

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
    ]
    if codec.id == "3lc":
        candidates.append(
            Candidate(
                "torch",
                lambda: torch_ternary.encode(values, plain_residual, 1.0),
                lambda: plain_residual.copy_(torch.from_numpy(residual)),
                turns=min(turns, SLOW_TURNS),
            )
        )
    calls = max(1, 2_000_000 // size) if context.residual is None else 1
    seconds = race(candidates, turns=turns if size > 4_000_000 else 4 * turns, calls=calls)
    payload = len(parse(frame, copy=False).payload)
    row: dict[str, Any] = {
        "codec": codec.id,
        "elements": size,
        "zero_fraction": zero_fraction,
        "bits_per_value": 8 * payload / size,
        "encode_gbps": 4e-9 * size / seconds["encode"],
        "decode_gbps": 4e-9 * size / seconds["decode"],
        "encode_vs_floor": seconds["floor"] / seconds["encode"],
        "encode_vs_torch": seconds["torch"] / seconds["encode"] if "torch" in seconds else None,
        "decode_vs_memcpy": seconds["memcpy"] / seconds["decode"],
        "accumulate_vs_rmw": seconds["rmw"] / seconds["accumulate"],
        "seconds": seconds,
    }
    return row
