"""General compressors on the bytes of a gradient: what somebody would try who knows of no codec for gradients.

Lossless and without a residual, so they gain little: the low mantissa bits are noise. zstd comes with thinwire; lz4 and
blosc2 are measured where they are installed (`pip install "thinwire[bench]"`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Peer(NamedTuple):
    """A compressor of bytes, on one thread at its fastest level."""

    name: str
    encode: Callable[[Floats], bytes]
    decode: Callable[[bytes], Any]


def installed() -> list[Peer]:
    """The compressors that are here."""
    found = [_zstd()]
    if find_spec("lz4"):
        found.append(_lz4())
    if find_spec("blosc2"):
        found += [_blosc2("LZ4"), _blosc2("ZSTD")]
    return found


def _zstd() -> Peer:
    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return Peer("raw zstd-1", lambda values: compressor.compress(values.data), decompressor.decompress)


def _lz4() -> Peer:
    block: Any = import_module("lz4.block")
    return Peer("raw lz4", lambda values: bytes(block.compress(values.data)), block.decompress)


def _blosc2(codec: str) -> Peer:
    blosc2: Any = import_module("blosc2")
    options = {
        "codec": getattr(blosc2.Codec, codec),
        "clevel": 1,
        "typesize": 4,
        "nthreads": 1,
        "filters": [blosc2.Filter.BITSHUFFLE],
    }
    return Peer(
        f"raw blosc2-{codec.lower()}",
        lambda values: bytes(blosc2.compress2(values, **options)),
        lambda packed: blosc2.decompress2(packed, nthreads=1),
    )
