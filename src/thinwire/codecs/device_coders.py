"""Which codecs have GPU kernels, and how each of them calls its own.

One `match` per step, a case per codec: `start` queues a batch, `packed` says what became of a tensor, `unpack` fills
one. A codec that is not named here runs on the CPU (`thinwire.codecs.device`). Importing this file imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from thinwire.codecs import int8, onebit, threelc
from thinwire.codecs.base import Codec, Packed
from thinwire.codecs.int8 import Int8
from thinwire.codecs.onebit import OneBit
from thinwire.codecs.threelc import ThreeLC
from thinwire.errors import NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.contract import non_finite
from thinwire.kernels.gpu.levels import decode_int8, encode_int8
from thinwire.kernels.gpu.pending import Pending, Sent
from thinwire.kernels.gpu.signs import decode_signs, encode_signs
from thinwire.kernels.gpu.ternary import decode_ternary, encode_ternary
from thinwire.kernels.gpu.workspace import DeviceWorkspace
from thinwire.kernels.moments import require_finite_magnitude

_NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def encodes(codec: Codec) -> bool:
    """Whether there are kernels for this codec as it is configured. A subclass is another codec."""
    return type(codec) in (ThreeLC, Int8) or (type(codec) is OneBit and codec.zeros == "plus")


def decodes(kind: type[Codec], frame: Frame) -> bool:
    """Whether there are kernels for this frame."""
    return kind in (ThreeLC, Int8) or (kind is OneBit and not frame.flags & onebit.ZEROS_KEPT)


def start(
    codec: Codec, values: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor] | None, workspace: DeviceWorkspace
) -> Pending:
    """Queues the encoding of flat, non-empty tensors of one type on one device."""
    # A refused tensor raises for the whole batch, unless the codec skips: then only its own residual stays.
    shared: dict[str, Any] = {
        "residuals": residuals,
        "residual_scale": codec.error_scale,
        "together": codec.nonfinite == "raise",
        "workspace": workspace,
    }
    match codec:
        case ThreeLC():
            return encode_ternary(
                values,
                sparsity=codec.sparsity,
                layout=codec.layout,
                zero_run=codec.zero_run,
                paper_literal=codec.paper_literal,
                **shared,
            )
        case Int8():
            largest_scale = float(int8.largest_scale(_NUMPY_TYPES[values[0].dtype]))
            return encode_int8(values, largest_scale=largest_scale, **shared)
        case OneBit():
            return encode_signs(values, norm=codec.norm, **shared)
    raise TypeError(f"{codec.id} has no GPU kernels")


def packed(codec: Codec, sent: Sent) -> Packed | NonFiniteError:
    """What one tensor of a batch became; an error that is not raised where it was refused."""
    try:
        if not isinstance(codec, ThreeLC):
            require_finite_magnitude(sent.largest)
        elif not sent.finite:
            raise NonFiniteError(non_finite(sent.largest, codec.sparsity))
    except NonFiniteError as error:
        return error
    return Packed(sent.payload, (sent.scale,), codec.flags if isinstance(codec, ThreeLC) else 0)


def unpack(kind: type[Codec], frame: Frame, out: torch.Tensor, accumulate: bool, workspace: DeviceWorkspace) -> None:
    """Fills (or adds into) flat `out`. Raises FrameError before `out` is touched."""
    if kind is ThreeLC:
        decode_ternary(
            frame.payload,
            scale=threelc.scale_of(frame),
            out=out,
            layout="partition" if frame.flags & threelc.PARTITION else "stride",
            zero_run=bool(frame.flags & threelc.ZERO_RUN),
            accumulate=accumulate,
            workspace=workspace,
        )
    elif kind is Int8:
        levels, scale = int8.levels_of(frame, _NUMPY_TYPES[out.dtype])
        decode_int8(levels, scale=scale, out=out, accumulate=accumulate, workspace=workspace)
    else:
        scale = onebit.scale_of(frame)
        decode_signs(frame.payload, low=0.0 - scale, high=scale, out=out, accumulate=accumulate, workspace=workspace)
