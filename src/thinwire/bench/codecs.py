"""How fast a codec is, beside what the machine can do at all and beside what a user would write.

The limits, on the same thread in the same run: memcpy; the two passes that any encoder with a residual must make
(`r += g`, then `r = f(r)`: 20 bytes a value); in-place read-modify-write; and for each codec the time in which memcpy
would move its own traffic: 8 bytes a value for two reading passes, 20 with a residual, and the payload. Times are of
the public calls, so they include the frame and its checksum. GB/s are of the float32 values that go in or come out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.bench import codec_figures, codec_peers, torch_ternary
from thinwire.bench.harness import Bench, Figures, Measured, Tell, column
from thinwire.bench.timing import Candidate, one_torch_thread, side_by_side
from thinwire.codecs import Context, decode, ids
from thinwire.codecs.base import Codec
from thinwire.frames import parse
from thinwire.jobs.tables import Table
from thinwire.kernels.numba import limits
from thinwire.policies.designs import codec_by_name

SIZES = (25_600_000, 1_000_000)
ZERO_FRACTIONS = (0.6, 0.8, 0.9, 0.95, 0.99, 0.999)
BLOCK = 4096
SLOW_TURNS = 3

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Cell:
    """A codec, a raw compressor, or a figure of `codec_figures`; that many values, that share of them zero."""

    codec: str
    elements: int
    zero_fraction: float
    turns: int

    def __str__(self) -> str:
        return f"{self.codec}, {self.elements:,} values"


class Speed(Figures, frozen=True, kw_only=True):
    """Sizes and speeds of a codec at a cell, and ratios to what it is held against; None where it is not.

    Attributes:
        bits_per_value: of the payload.
        encode_vs_floor: of the two passes' speed.
        encode_vs_traffic: of memcpy's speed with the codec's own bytes.
        encode_vs_torch, encode_vs_quantize: times the speed of plain torch, of `torch.quantize_per_tensor`.
        decode_vs_memcpy, accumulate_vs_rmw: of memcpy's speed, of read-modify-write's.
        seconds: medians by candidate.
    """

    bits_per_value: float
    encode_gbps: float
    decode_gbps: float
    encode_vs_floor: float | None = None
    encode_vs_traffic: float
    encode_vs_torch: float | None = None
    encode_vs_quantize: float | None = None
    decode_vs_memcpy: float
    accumulate_vs_rmw: float | None = None
    seconds: dict[str, float]


@dataclass(kw_only=True)
class CodecsBench(Bench[Cell, Figures]):
    """Codecs on one thread, beside memcpy, the two-pass floor, plain torch and raw compressors.

    Args:
        only: codecs, options in brackets; by default all, and raw compressors.
        elements: numbers of values.
        zero_fraction: shares of the values that 3LC quantises to zero; data are made for each. Codecs that zero runs
            mean nothing to are measured at one of them alone.
        turns: timed turns of each candidate; medians are reported.
    """

    only: Sequence[str] = ()
    elements: Sequence[int] = SIZES
    zero_fraction: Sequence[float] = ZERO_FRACTIONS
    turns: int = 9
    _arrays: _Arrays | None = field(default=None, init=False)

    kinds = (Speed, *codec_figures.KINDS)
    columns = (
        ("codec", lambda cell, runs: cell.codec),
        ("values", lambda cell, runs: f"{cell.elements:,}"),
        ("zeros", lambda cell, runs: f"{cell.zero_fraction:g}"),
        column("bits/value", "bits_per_value", "{:.3f}"),
        column("encode GB/s", "encode_gbps"),
        column("decode GB/s", "decode_gbps"),
        column("of floor", "encode_vs_floor"),
        column("of traffic", "encode_vs_traffic"),
        column("× torch", "encode_vs_torch", "{:.1f}"),
        column("× quantize", "encode_vs_quantize", "{:.1f}"),
        column("of memcpy", "decode_vs_memcpy"),
        column("accumulate of rmw", "accumulate_vs_rmw"),
    )

    def __post_init__(self) -> None:
        for name in self.only:
            codec_by_name(name)

    @property
    def usual_fraction(self) -> float:
        """The share of zeros at which everything is measured that does not depend on it."""
        return 0.9 if 0.9 in self.zero_fraction else self.zero_fraction[0]

    def cells(self) -> list[Cell]:
        cells = []
        for elements in self.elements:
            for fraction in self.zero_fraction:
                usual = fraction == self.usual_fraction
                names = [name for name in self.only or ids() if usual or codec_by_name(name).id == "3lc"]
                names += [peer.name for peer in codec_peers.installed()] if usual and not self.only else []
                cells += [Cell(name, elements, fraction, self.turns) for name in names]
        largest = max(self.elements)
        return [*cells, *(Cell(name, largest, self.usual_fraction, self.turns) for name in codec_figures.FIGURES)]

    def measure(self, cell: Cell, before: Measured[Cell, Figures], tell: Tell) -> Figures:
        if cell.codec in codec_figures.FIGURES:
            self._arrays = None
            return codec_figures.FIGURES[cell.codec](cell.elements, cell.turns)
        with one_torch_thread(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # to be removed from torch one day
            if self._arrays is None or self._arrays.gradient.size != cell.elements:
                self._arrays = _Arrays(cell.elements)
            self._arrays.fill(cell.zero_fraction)
            for peer in codec_peers.installed():
                if peer.name == cell.codec:
                    return _peer_speed(peer, self._arrays.gradient, min(cell.turns, SLOW_TURNS))
            return _speed(cell.codec, self._arrays, cell.turns)

    def tables(self, measured: Measured[Cell, Figures]) -> list[Table]:
        speeds = {cell: runs for cell, runs in measured.items() if isinstance(runs[0], Speed)}
        others = [line for runs in measured.values() for line in codec_figures.describe(runs[0])]
        return [*super().tables(speeds), Table(["figure", "measured", "bar"], others)]

    def notes(self, measured: Measured[Cell, Figures]) -> list[str]:
        return [f"Raw compressors and codecs without zero runs are measured at {self.usual_fraction:g} zeros."]


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
        self._zero_fraction = -1.0
        self._contexts: dict[str, Context] = {}

    def fill(self, zero_fraction: float) -> None:
        """Draws data with this share of zeros, where they are not there yet."""
        if zero_fraction != self._zero_fraction:
            self.gradient[:], self.residual[:] = draw(self.gradient.size, zero_fraction)
            self._zero_fraction = zero_fraction

    def context(self, name: str) -> Context:
        """The context of a codec, the same one for every share of zeros."""
        if name not in self._contexts:
            self._contexts[name] = codec_by_name(name).context(torch.from_numpy(self.gradient))
        return self._contexts[name]


def _peer_speed(peer: codec_peers.Peer, values: Floats, turns: int) -> Speed:
    packed = peer.encode(values)
    if not np.array_equal(np.frombuffer(peer.decode(packed), np.float32), values):
        raise AssertionError(f"{peer.name} is not lossless")  # a wrong call of ours would be a wrong row
    other = np.empty_like(values)
    seconds = side_by_side(
        [
            Candidate("encode", lambda: peer.encode(values)),
            Candidate("decode", lambda: peer.decode(packed)),
            Candidate("memcpy", lambda: np.copyto(other, values)),
        ],
        turns=turns,
    )
    return _summed_up(values.size, len(packed), 4, seconds)


def _speed(name: str, arrays: _Arrays, turns: int) -> Speed:
    codec = codec_by_name(name)
    gradient, residual, size = arrays.gradient, arrays.residual, arrays.gradient.size
    values = torch.from_numpy(gradient)
    context = arrays.context(name)
    frame = codec.encode(torch.from_numpy(gradient + residual))
    out, other, scratch, plain_residual = arrays.out, arrays.other, arrays.scratch, arrays.plain_residual
    slow_turns = min(turns, SLOW_TURNS)

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
        Candidate("quantize", lambda: quantize_per_tensor(values), turns=slow_turns),
    ]
    plain = _plain_torch(codec, values, plain_residual)
    if plain is not None:
        restore_plain = lambda: plain_residual.copy_(torch.from_numpy(residual))  # noqa: E731
        candidates.append(Candidate("torch", plain, restore_plain, turns=slow_turns))
    calls = max(1, 2_000_000 // size) if context.residual is None else 1
    seconds = side_by_side(candidates, turns=turns if size > 4_000_000 else 4 * turns, calls=calls)
    payload = len(parse(frame, copy=False).payload)
    return _summed_up(size, payload, 8 if context.residual is None else 20, seconds)


def _summed_up(size: int, payload: int, read_nbytes: int, seconds: dict[str, float]) -> Speed:
    """Ratios of the seconds; `read_nbytes` are those that an encoder moves per value, besides the payload."""

    def ratio(ours: str, other: str) -> float | None:
        return seconds[other] / seconds[ours] if ours in seconds and other in seconds else None

    return Speed(
        bits_per_value=8 * payload / size,
        encode_gbps=4e-9 * size / seconds["encode"],
        decode_gbps=4e-9 * size / seconds["decode"],
        encode_vs_floor=ratio("encode", "floor"),
        encode_vs_traffic=seconds["memcpy"] * (read_nbytes + payload / size) / 8 / seconds["encode"],
        encode_vs_torch=ratio("encode", "torch"),
        encode_vs_quantize=ratio("encode", "quantize"),
        decode_vs_memcpy=seconds["memcpy"] / seconds["decode"],
        accumulate_vs_rmw=ratio("accumulate", "rmw"),
        seconds=seconds,
    )


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
