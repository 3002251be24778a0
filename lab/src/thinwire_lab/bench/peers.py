"""A user's alternatives to a codec: general compressors, torch's quantisation, plain operators.

General compressors work on the bytes of a gradient. They are lossless and keep no residual, so they gain little: the
low mantissa bits are noise. zstd comes with thinwire; lz4 and blosc2 are measured if installed (`pip install lz4
blosc2`). 3LC in plain operators makes the same bytes as `tw.codec("3lc")`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from thinwire.codecs.base import Codec

Floats = NDArray[np.float32]
ZERO_CODE = 121
RUN_CODE = 243
MAX_RUN = 14


class Peer(NamedTuple):
    """A compressor of bytes, on one thread at its fastest level."""

    encode: Callable[[Floats], bytes]
    decode: Callable[[bytes], Any]


def installed() -> dict[str, Peer]:
    """Returns the installed compressors by name."""
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    found = {"raw zstd-1": Peer(lambda values: compressor.compress(values.data), decompressor.decompress)}
    if find_spec("lz4"):
        block: Any = import_module("lz4.block")
        found["raw lz4"] = Peer(lambda values: bytes(block.compress(values.data)), block.decompress)
    if find_spec("blosc2"):
        found["raw blosc2-lz4"], found["raw blosc2-zstd"] = _blosc2("LZ4"), _blosc2("ZSTD")
    return found


def _blosc2(codec: str) -> Peer:
    blosc2: Any = import_module("blosc2")
    shuffle = [blosc2.Filter.BITSHUFFLE]
    options = {"codec": getattr(blosc2.Codec, codec), "clevel": 1, "typesize": 4, "nthreads": 1, "filters": shuffle}
    return Peer(
        lambda values: bytes(blosc2.compress2(values, **options)),
        lambda packed: blosc2.decompress2(packed, nthreads=1),
    )


def quantize_per_tensor(values: torch.Tensor) -> torch.Tensor:
    """Quantises with torch: 8 bits a value, no residual."""
    scale = float(values.abs().max()) / 127
    return torch.quantize_per_tensor(values, scale, 0, torch.qint8)


def plain_torch(codec: Codec, values: torch.Tensor, residual: torch.Tensor) -> Callable[[], Any] | None:
    """Returns the same scheme in plain torch operators, if there is an obvious way to write it."""
    match codec.id:
        case "3lc":
            return lambda: encode_ternary(values, residual, 1.0)
        case "int8":
            return lambda: quantize_per_tensor(values).int_repr()
        case "bf16":
            return lambda: values.to(torch.bfloat16)
        case _:
            return None


def encode_ternary(gradient: torch.Tensor, residual: torch.Tensor, sparsity: float) -> tuple[float, torch.Tensor]:
    """Encodes residual + gradient (flat float32) and updates the residual. Returns the scale and the payload."""
    total = residual + gradient
    scale = total.abs().max() * sparsity
    trits = torch.where(total.abs() > scale / 2, torch.sign(total), torch.zeros_like(total))
    residual.copy_(total - scale * trits)
    digits = (trits + 1).to(torch.uint8)
    padding = -digits.numel() % 5
    digits = torch.nn.functional.pad(digits, (0, padding), value=1).view(-1, 5)
    codes = digits[:, 0] * 81 + digits[:, 1] * 27 + digits[:, 2] * 9 + digits[:, 3] * 3 + digits[:, 4]
    return float(scale), zero_runs(codes)


def zero_runs(codes: torch.Tensor) -> torch.Tensor:
    """Encodes zero runs: a zero code's position in its run decides its output."""
    zero = codes == ZERO_CODE
    _, counts = torch.unique_consecutive(zero, return_counts=True)
    starts = counts.cumsum(0) - counts
    position = torch.arange(codes.numel(), device=codes.device) - starts.repeat_interleave(counts)
    length = counts.repeat_interleave(counts)
    chunk = torch.clamp(length - position // MAX_RUN * MAX_RUN, max=MAX_RUN)
    first = position % MAX_RUN == 0
    out = torch.where(zero & (chunk > 1), (chunk + (RUN_CODE - 2)).to(torch.uint8), codes)
    keep = ~zero | first
    return out[keep]
