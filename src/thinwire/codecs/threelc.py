"""`3lc`: 3-value quantisation with sparsity multiplication, base-3⁵ packing, zero-run encoding (3LC §3).

    v = residual + x            m = max|v|·s            q = sign(v) where |v| > m/2, else 0
    residual = v − m·q          five trits → one byte   runs of 2…14 zero bytes → one byte

The arithmetic is in `thinwire.kernels`; this file defines the options and the frame's flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from thinwire.codecs.lag import FIRST_SPARSITY, DeltaLagBound, LagBound
from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Scheme, Step
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import ConfigError
from thinwire.frames import Flags, Frame
from thinwire.kernels.contract import FIRST_RUN, Floats
from thinwire.kernels.numba.ternary import decode_ternary, encode_ternary

ZERO_RUN = int(Flags.OPTION_A)
"""The payload is zero-run encoded."""
PARTITION = int(Flags.OPTION_B)
"""Five equal partitions, the paper's numbered steps; without it, contiguous groups of five."""

TRITS_PER_BYTE = 5
MAX_RUN = 14


@dataclass(frozen=True, kw_only=True)
class ThreeLC(Scheme):
    """0.1–1.6 bits a value, with a residual that adds unsent values to the next step.

    Args:
        sparsity: the sparsity multiplier s, 1 ≤ s < 2: more zeros, larger survivors, a longer lag (3LC §3.1).
        clip: the factor on max|v| in m, 0.5 … 1 (not in the paper). Below 1, larger values are sent in part, fewer
            values become zero, and the residual is smaller in total. With s = 1 a value leaves at most half of max|v|
            in the residual.
        lag: the largest lag of a residual, in steps (not in the paper): contexts measure the lag and choose s from 1 to
            `sparsity`, see `LagBound`; without a residual s is 1. None: s is `sparsity`.
        layout: `"stride"` packs contiguous groups of five (1–17 % smaller on real gradients);
            `"partition"` the paper's five partitions. A flag of the frame gives the layout.
        zero_run: False is the paper's "No ZRE" row: exactly 1.6 bits a value.
    """

    id: ClassVar[str] = "3lc"
    checks_finite: ClassVar[bool] = True
    keeps_residual: ClassVar[bool] = True
    option_flags: ClassVar[int] = ZERO_RUN | PARTITION
    num_scales: ClassVar[int] = 1
    fuses: ClassVar[bool] = True

    sparsity: float = 1.0
    clip: Annotated[float, Between(0.5, 1)] = 1.0
    lag: Annotated[float | None, Between(1)] = None
    layout: Literal["stride", "partition"] = "stride"
    zero_run: bool = True

    def __post_init__(self) -> None:
        try:
            given: object = self.sparsity
            number = isinstance(given, int | float | np.floating) and not isinstance(given, bool)
            inside = number and 1.0 <= self.sparsity < 2.0 and bool(np.float32(self.sparsity) < np.float32(2.0))
        except (TypeError, ValueError):
            inside = False
        if not inside:
            raise ConfigError(
                f"3lc: sparsity={self.sparsity!r}; it must lie in [1, 2) as a float32 "
                "(at 2 every value would round to zero and nothing would ever be sent)"
            )
        super().__post_init__()

    @property
    def multiplier(self) -> float:
        """The factor on the largest magnitude, m / max|v|; with a bound on the lag, before the first measurement."""
        return (self.sparsity if self.lag is None else FIRST_SPARSITY) * self.clip

    def multiplier_at(self, step: Step) -> float:
        """As `multiplier`, for a step whose s a bound on the lag may have chosen."""
        return self.multiplier if step.sparsity is None else step.sparsity * self.clip

    def lag_bound(self) -> LagBound | None:
        return None if self.lag is None else LagBound(self.lag, self.sparsity, self.clip)

    def delta_lag_bound(self) -> DeltaLagBound | None:
        return None if self.lag is None else DeltaLagBound(self.lag, self.sparsity, self.clip)

    @property
    def batched(self) -> bool:
        """Whether one kernel call encodes many tensors with these options."""
        return self.layout == "stride" and self.zero_run

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        values, residual = flat.values, step.residual
        if self.layout == "partition":
            values, residual = _by_fifths(values), None if residual is None else _by_fifths(residual)
        scale, payload = encode_ternary(
            values,
            sparsity=self.multiplier_at(step),
            zero_run=self.zero_run,
            residual=residual,
            residual_scale=step.residual_scale,
            workspace=space.kernel,
        )
        if self.layout == "partition" and step.residual is not None and residual is not None:
            step.residual[:] = _in_order(residual)[: flat.values.size]
        return Payload(payload, (scale,), self.flags)

    @property
    def flags(self) -> int:
        return (ZERO_RUN if self.zero_run else 0) | (PARTITION if self.layout == "partition" else 0)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        into, adds, partition = out, accumulate, frame.flags & PARTITION
        if partition:
            into, adds = space.array("3lc.values", TRITS_PER_BYTE * -(-out.size // TRITS_PER_BYTE), out.dtype), False
        decode_ternary(
            frame.payload,
            scale=frame.scales[0],
            out=into,
            zero_run=frame.flags & ZERO_RUN != 0,
            accumulate=adds,
            workspace=space.kernel,
        )
        if partition:
            sent = _in_order(into)[: out.size]
            np.add(out, sent, out=out, where=sent != 0) if accumulate else np.copyto(out, sent)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        groups = -(-frame.size // TRITS_PER_BYTE)
        partition, zero_run = bool(frame.flags & PARTITION), bool(frame.flags & ZERO_RUN)
        runs = int(np.count_nonzero(np.frombuffer(frame.payload, np.uint8) >= FIRST_RUN)) if zero_run else 0
        return {
            "m": (frame.scales[0], "max|v| · sparsity · clip: decoded values are -m, 0 and m"),
            "zero runs": (zero_run, "OPTION_A: a byte of 243 … 255 stands for 2 … 14 groups of five zeros"),
            "layout": (
                "partition" if partition else "stride",
                "OPTION_B: a byte takes one value of each fifth of the tensor; without it, five neighbours",
            ),
            "groups": (groups, "of five values, a byte in base 3 each before zero runs: 121 is five zeros"),
            "runs": (runs, "bytes that stand for several groups of zeros"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return -(-frame.size // TRITS_PER_BYTE)

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        groups = -(-frame.size // TRITS_PER_BYTE)
        return -(-groups // MAX_RUN) if frame.flags & ZERO_RUN else groups


def _by_fifths(values: Floats) -> Floats:
    """Returns the values with one of each fifth side by side; zeros fill the last fifth."""
    padded = np.zeros(TRITS_PER_BYTE * -(-values.size // TRITS_PER_BYTE), values.dtype)
    padded[: values.size] = values
    return padded.reshape(TRITS_PER_BYTE, -1).T.reshape(-1)


def _in_order(values: Floats) -> Floats:
    """Undoes `_by_fifths`, but keeps its zeros."""
    return values.reshape(-1, TRITS_PER_BYTE).T.reshape(-1)
