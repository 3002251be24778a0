"""The speed of a codec, beside the machine's limits and beside a user's alternatives.

The limits on the CPU, on the same thread in the same run, are memcpy; the two passes of any encoder with a residual
(`r += g`, then `r = f(r)`: 20 bytes a value); and for each codec the time in which memcpy would move the codec's
traffic: 8 bytes a value for two reading passes, 20 with a residual, and the payload. Times are those of the public
calls, frame and checksum included. GB/s count float32 values in or out.

On a GPU the limits come from a measured device-to-device copy. The time of encoding ends with the payload on the
device.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.codecs import codec as make_codec
from thinwire.codecs import ids
from thinwire.errors import ConfigError
from thinwire.frames import parse
from thinwire.kernels import triton
from thinwire.policies.compression import codec_by_name
from thinwire_lab.bench import codec_inputs, peers
from thinwire_lab.bench.codec_inputs import ROTATION, SLOW_TURNS, Arrays
from thinwire_lab.bench.harness import Bench, Column, Figures, Tell, column
from thinwire_lab.bench.options import CodecsOptions
from thinwire_lab.bench.timing import side_by_side
from thinwire_lab.jobs.grid import Measured

DEVICE_SIZES, DEVICE_ZERO_FRACTIONS = (100_000_000, 25_600_000, 1_000_000), (0.8, 0.95, 0.99)
"""The defaults on a GPU."""
DEVICE_CODECS = ("3lc", "int8", "onebit")
"""Codecs that queue all their launches at once."""
INTERPRETER = "interpreter"
"""A device for tests: Triton's interpreter on the CPU."""


@dataclass(frozen=True)
class CodecCell:
    """A codec or a raw compressor, the number of values, and the share of zeros."""

    codec: str
    elements: int
    zero_fraction: float
    turns: int
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.codec}, {self.elements:,} values"

    @property
    def place(self) -> torch.device:
        """The device of its tensors."""
        return torch.device("cpu" if self.device == INTERPRETER else self.device)


class Speed(Figures, frozen=True, kw_only=True):
    """A codec's sizes and speeds at a cell, median seconds by candidate, and ratios to the baselines."""

    device_name: str = ""
    bits_per_value: float
    encode_gbps: float
    decode_gbps: float
    encode_vs_floor: float | None
    encode_vs_traffic: float
    encode_vs_torch: float | None
    encode_vs_quantize: float | None
    seconds: dict[str, float]


COLUMNS: Sequence[Column[Any, Any]] = (
    ("codec", lambda cell, run: cell.codec),
    ("values", lambda cell, run: f"{cell.elements:,}"),
    ("zeros", lambda cell, run: f"{cell.zero_fraction:g}"),
    column("bits/value", "bits_per_value", "{:.3f}"),
    column("encode GB/s", "encode_gbps"),
    column("decode GB/s", "decode_gbps"),
    column("of floor", "encode_vs_floor"),
    column("of traffic", "encode_vs_traffic"),
    column("× torch", "encode_vs_torch", "{:.1f}"),
    column("× quantize", "encode_vs_quantize", "{:.1f}"),
)


@dataclass(kw_only=True)
class CodecsBench(CodecsOptions, Bench[CodecCell, Speed]):
    """Codecs on one thread, beside memcpy, the two-pass floor, plain torch and raw compressors; or on a GPU."""

    _arrays: Arrays | None = field(default=None, init=False)

    kinds = (Speed,)
    columns = COLUMNS

    def __post_init__(self) -> None:
        if self.device == "cpu":
            for name in self.only:
                codec_by_name(name)
            return
        if self.device != INTERPRETER and not torch.cuda.is_available():
            raise ConfigError("torch finds no CUDA device here; leave --device out to measure the CPU's kernels")
        if missing := triton.missing():
            raise ConfigError(missing)
        self.only = self.only or DEVICE_CODECS
        if others := [codec_id for codec_id in self.only if codec_id not in DEVICE_CODECS]:
            raise ConfigError(f"the GPU bench does not measure {others}; it measures {list(DEVICE_CODECS)}")
        if self.elements == CodecsOptions.elements:
            self.elements = DEVICE_SIZES
        if self.zero_fraction == CodecsOptions.zero_fraction:
            self.zero_fraction = DEVICE_ZERO_FRACTIONS

    @property
    def usual_fraction(self) -> float:
        """The share of zeros for all measurements on the CPU that do not depend on it."""
        return 0.9 if 0.9 in self.zero_fraction else self.zero_fraction[0]

    def cells(self) -> list[CodecCell]:
        cells, on_cpu = [], self.device == "cpu"
        for elements in self.elements:
            for fraction in self.zero_fraction:
                usual = fraction == self.usual_fraction or not on_cpu
                names = [name for name in self.only or ids() if usual or codec_by_name(name).id == "3lc"]
                names += peers.installed() if usual and not self.only else []
                cells += [CodecCell(name, elements, fraction, self.turns, self.device) for name in names]
        return cells

    def measure(self, cell: CodecCell, before: Measured[CodecCell, Speed], tell: Tell) -> Speed:
        if self._arrays is None or self._arrays.size != cell.elements:
            self._arrays = Arrays(cell.elements, cell.place, 1 if cell.device == "cpu" else ROTATION)
        self._arrays.fill(cell.zero_fraction)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # deprecated
                return speed(cell, self._arrays)
        finally:
            torch.set_num_threads(threads)

    def notes(self, measured: Measured[CodecCell, Speed]) -> list[str]:
        if self.device != "cpu":
            return []
        return [f"Raw compressors and codecs without zero runs are measured at {self.usual_fraction:g} zeros."]


def speed(cell: CodecCell, arrays: Arrays) -> Speed:
    """Measures a codec or a raw compressor beside its baselines."""
    size, device, calls, turns = arrays.size, arrays.device, 1, cell.turns
    if (peer := peers.installed().get(cell.codec)) is not None:
        candidates, payload_nbytes = codec_inputs.compressor(peer, arrays)
        read_nbytes, turns = 4, min(turns, SLOW_TURNS)
    else:
        on_cpu = cell.device == "cpu"
        codec = codec_by_name(cell.codec) if on_cpu else make_codec(cell.codec, error_feedback=True)
        frame = codec.encode(arrays.gradients[0] + arrays.residuals[0])
        payload_nbytes = len(parse(frame, copy=False).payload)
        if on_cpu:
            context = arrays.context(cell.codec)
            candidates = codec_inputs.on_cpu(codec, context, frame, arrays, turns)
            kept = context.residual is not None
        else:
            candidates, kept = codec_inputs.on_gpu(codec, frame, arrays), True
        read_nbytes = 20 if kept else 8
        if on_cpu:
            calls, turns = 1 if kept else max(1, 2_000_000 // size), turns if size > 4_000_000 else 4 * turns
    seconds = side_by_side(candidates, turns=turns, calls=calls, device=device)
    if cell.device != "cpu":
        seconds["floor"] = seconds["memcpy"] * 20 / 8  # gradient and residual read twice, residual written once

    def ratio(ours: str, other: str) -> float | None:
        return seconds[other] / seconds[ours] if ours in seconds and other in seconds else None

    return Speed(
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        bits_per_value=8 * payload_nbytes / size,
        encode_gbps=4e-9 * size / seconds["encode"],
        decode_gbps=4e-9 * size / seconds["decode"],
        encode_vs_floor=ratio("encode", "floor"),
        encode_vs_traffic=seconds["memcpy"] * (read_nbytes + payload_nbytes / size) / 8 / seconds["encode"],
        encode_vs_torch=ratio("encode", "torch"),
        encode_vs_quantize=ratio("encode", "quantize"),
        seconds=seconds,
    )
