"""`3lc`: 3-value quantisation with sparsity multiplication, base-3⁵ packing, zero-run encoding (3LC §3).

    v = residual + x            m = max|v|·s            q = sign(v) where |v| > m/2, else 0
    residual = v − m·q          five trits → one byte   runs of 2…14 zero bytes → one byte

The arithmetic is in `thinwire.kernels`; this file says what the frame's flags mean.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from thinwire import executor
from thinwire.codecs.base import Codec, Draws, Explained, Packed
from thinwire.codecs.scratch import Scratch, scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Flags, Frame
from thinwire.kernels.contract import FIRST_RUN
from thinwire.kernels.numba import Workspace, decode_ternary, encode_ternary
from thinwire.kernels.numba.ternary_slices import COALESCE, decode_slices, encode_slices

ZERO_RUN = int(Flags.OPTION_A)
"""The payload is zero-run encoded."""
PARTITION = int(Flags.OPTION_B)
"""Five equal partitions, the paper's numbered steps; without it, contiguous groups of five."""

TRITS_PER_BYTE = 5
MAX_RUN = 14

MIN_SLICE = 1 << 20
"""Values a thread must have for itself: handing a slice over takes longer than encoding a smaller one."""
MAX_THREADS = 256


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
        threads: how many threads share a tensor of 2**21 values or more; 0 takes one for each core. The bytes and the
            residual are those of one thread.
        coalesce: `"canonical"`, or `"paper"`, which cuts into exactly `threads` parts and joins their zero runs
            byte by byte at the borders, as §3.3 has it: its bytes depend on the number of parts.
    """

    id: ClassVar[str] = "3lc"
    keeps_residual: ClassVar[bool] = True
    private_options: ClassVar[frozenset[str]] = frozenset({"threads"})
    option_flags: ClassVar[int] = int(ZERO_RUN | PARTITION)

    sparsity: float = 1.0
    layout: Literal["stride", "partition"] = "stride"
    zero_run: bool = True
    paper_literal: bool = False
    threads: int = 1
    coalesce: Literal["canonical", "paper"] = "canonical"

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
        if not isinstance(self.threads, int) or isinstance(self.threads, bool) or not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"3lc: threads={self.threads!r}; allowed are 0 (one for each core) … {MAX_THREADS}")
        if self.coalesce not in COALESCE:
            raise ConfigError(f"3lc: coalesce={self.coalesce!r}; allowed are 'canonical' and 'paper'")
        if self.coalesce == "paper" and self.threads == 0:
            raise ConfigError(
                "3lc: coalesce='paper' with threads=0 would make other bytes on other machines; say how many"
            )

    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        return self._pack(flat, None, space)

    def pack_residual(self, flat: Flat, residual: FloatArray, space: Scratch, draws: Draws | None) -> Packed:
        return self._pack(flat, residual, space)

    def _pack(self, flat: Flat, residual: FloatArray | None, space: Scratch) -> Packed:
        size = flat.values.size
        slices = 1 if self.threads == 1 else num_slices(size, self.threads)
        if self.coalesce == "paper":
            slices = self.threads
        if slices == 1:
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
        crew = executor.current() if num_slices(size, slices) > 1 else executor.InTurn()
        with ExitStack() as loans:
            scale, payload = encode_slices(
                flat.values,
                sparsity=self.sparsity,
                layout=self.layout,
                zero_run=self.zero_run,
                paper_literal=self.paper_literal,
                residual=residual,
                residual_scale=self.error_scale,
                coalesce=self.coalesce,
                workspaces=_workspaces(space, slices, loans),
                executor=crew,
            )
        return Packed(payload, (scale,), self.flags)

    @property
    def flags(self) -> int:
        """The flags of its frames."""
        return (ZERO_RUN if self.zero_run else 0) | (PARTITION if self.layout == "partition" else 0)

    @classmethod
    def unpack(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        scale, layout = scale_of(frame), "partition" if frame.flags & PARTITION else "stride"
        zero_run = frame.flags & ZERO_RUN != 0
        slices = 1 if space.threads == 1 else num_slices(out.size, space.threads)
        if slices == 1:
            decode_ternary(
                frame.payload,
                scale=scale,
                out=out,
                layout=layout,
                zero_run=zero_run,
                accumulate=accumulate,
                workspace=space.kernel,
            )
            return
        with ExitStack() as loans:
            decode_slices(
                frame.payload,
                scale=scale,
                out=out,
                layout=layout,
                zero_run=zero_run,
                accumulate=accumulate,
                workspaces=_workspaces(space, slices, loans),
                executor=executor.current(),
            )

    @classmethod
    def explain(cls, frame: Frame) -> Explained:
        groups = -(-frame.size // TRITS_PER_BYTE)
        partition, zero_run = bool(frame.flags & PARTITION), bool(frame.flags & ZERO_RUN)
        runs = int(np.count_nonzero(np.frombuffer(frame.payload, np.uint8) >= FIRST_RUN)) if zero_run else 0
        return {
            "m": (scale_of(frame), "max|v| · sparsity: decoded values are -m, 0 and m"),
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


def num_slices(size: int, threads: int) -> int:
    """How many slices of a tensor of `size` values are worth a thread each; `threads` = 0 means one for each core.

    Example:
        >>> [num_slices(size, 4) for size in (1_000_000, 2_500_000, 25_600_000)]
        [1, 2, 4]
    """
    return max(1, min(threads or executor.current().width, size // MIN_SLICE))


def _workspaces(space: Scratch, slices: int, loans: ExitStack) -> list[Workspace]:
    """One workspace for each slice, the caller's own first; the others go back with `loans`."""
    return [space.kernel, *(loans.enter_context(scratch()).kernel for _ in range(slices - 1))]
