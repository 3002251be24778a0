"""`3lc`: 3-value quantisation with sparsity multiplication, base-3⁵ packing, zero-run encoding (3LC §3).

    v = residual + x            m = max|v|·s            q = sign(v) where |v| > m/2, else 0
    residual = v − m·q          five trits → one byte   runs of 2…14 zero bytes → one byte

The arithmetic is in `thinwire.kernels`; this file says what the frame's flags mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from thinwire.codecs.base import Codec, Draws, Packed
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Flags, Frame
from thinwire.kernels import decode_ternary, encode_ternary

ZERO_RUN = Flags.OPTION_A
"""The payload is zero-run encoded."""
PARTITION = Flags.OPTION_B
"""Five equal partitions, the paper's numbered steps; without it, contiguous groups of five."""

TRITS_PER_BYTE = 5
MAX_RUN = 14


def scale_of(frame: Frame) -> float:
    """The frame's one scale, m (`FrameError` where it is another number of scales, or negative)."""
    if len(frame.scales) != 1 or frame.scales[0] < 0:
        raise FrameError(f"3lc sends one scale of at least 0; {list(frame.scales)[:4]} came")
    return frame.scales[0]


@dataclass(frozen=True, kw_only=True)
class ThreeLC(Codec):
    """0.1–1.6 bits a value, with a residual that carries what was not sent to the next step.

    Args:
        sparsity: the sparsity multiplier s, 1 ≤ s < 2: more zeros, larger survivors, a longer lag (3LC §3.1).
        layout: `"stride"` packs contiguous groups of five (1–17 % smaller on real gradients);
            `"partition"` the paper's five partitions. The frame says which.
        zero_run: False is the paper's "No ZRE" row: exactly 1.6 bits a value.
        paper_literal: pads with the digit 0 as the text says (a quantised −1), which breaks the last zero run;
            decoders do not see the difference.
    """

    id: ClassVar[str] = "3lc"
    keeps_residual: ClassVar[bool] = True
    option_flags: ClassVar[int] = int(ZERO_RUN | PARTITION)

    sparsity: float = 1.0
    layout: Literal["stride", "partition"] = "stride"
    zero_run: bool = True
    paper_literal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            inside = float(self.sparsity) >= 1.0 and np.float32(self.sparsity) < np.float32(2.0)
        except (TypeError, ValueError):
            inside = False
        if not inside:
            raise ConfigError(
                f"3lc: sparsity={self.sparsity!r}; it must lie in [1, 2) as a float32 "
                "(at 2 every value would round to zero and nothing would ever be sent)"
            )
        if self.layout not in ("stride", "partition"):
            raise ConfigError(f"3lc: layout={self.layout!r}; allowed are 'stride' and 'partition'")

    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        return self._pack(flat, None, space)

    def pack_residual(self, flat: Flat, residual: FloatArray, space: Scratch, draws: Draws | None) -> Packed:
        return self._pack(flat, residual, space)

    def _pack(self, flat: Flat, residual: FloatArray | None, space: Scratch) -> Packed:
        scale, payload = encode_ternary(
            flat.values,
            sparsity=self.sparsity,
            layout=self.layout,
            zero_run=self.zero_run,
            paper_literal=self.paper_literal,
            residual=residual,
            residual_scale=self.error_scale,
            workspace=space.kernel,
        )
        return Packed(payload, (scale,), self.flags)

    @property
    def flags(self) -> int:
        """The flags of its frames."""
        return int((ZERO_RUN if self.zero_run else 0) | (PARTITION if self.layout == "partition" else 0))

    @classmethod
    def unpack(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        decode_ternary(
            frame.payload,
            scale=scale_of(frame),
            out=out,
            layout="partition" if frame.flags & PARTITION else "stride",
            zero_run=bool(frame.flags & ZERO_RUN),
            accumulate=accumulate,
            workspace=space.kernel,
        )

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return -(-frame.size // TRITS_PER_BYTE)

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        groups = -(-frame.size // TRITS_PER_BYTE)
        return -(-groups // MAX_RUN) if frame.flags & ZERO_RUN else groups
