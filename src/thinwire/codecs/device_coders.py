"""Which codecs have GPU kernels, and how each of them calls its own.

One `match` per step, a case per codec: `start` queues a batch, `packed` says what became of a tensor, `unpack` fills
one. A codec that is not named here runs on the CPU (`thinwire.codecs.device`). Importing this file imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from thinwire.codecs import int8, onebit, sparse, stochastic, threelc
from thinwire.codecs.base import Codec, Draws, Packed
from thinwire.codecs.int8 import Int8
from thinwire.codecs.onebit import OneBit
from thinwire.codecs.randomness import key_of
from thinwire.codecs.scratch import scratch
from thinwire.codecs.sparse import Sparse
from thinwire.codecs.stochastic import QSGDDoubleSqueeze, Stoch3, TernGrad
from thinwire.codecs.threelc import ThreeLC
from thinwire.codecs.threshold import Threshold
from thinwire.codecs.topk import TopK
from thinwire.errors import NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.contract import non_finite
from thinwire.kernels.numba.moments import require_finite_magnitude
from thinwire.kernels.triton.batch import Batch
from thinwire.kernels.triton.levels import decode_int8, encode_int8
from thinwire.kernels.triton.pending import Pending, Sent
from thinwire.kernels.triton.scatter import scatter
from thinwire.kernels.triton.select import Chosen, Form, Selected, encode_from, encode_top
from thinwire.kernels.triton.signs import decode_signs, encode_signs
from thinwire.kernels.triton.stochastic import clipped_at, decode_two_bit, encode_stochastic
from thinwire.kernels.triton.ternary import decode_ternary, encode_ternary
from thinwire.kernels.triton.workspace import DeviceWorkspace

_NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def encodes(codec: Codec) -> bool:
    """Whether there are kernels for this codec as it is configured. A subclass is another codec."""
    match codec:
        case ThreeLC():
            configured = codec.coalesce == "canonical"  # the paper's joins depend on the number of threads
        case OneBit():
            configured = codec.zeros == "plus"
        case _:
            configured = True
    return configured and type(codec) in (ThreeLC, Int8, OneBit, Stoch3, TernGrad, TopK, Threshold)


def decodes(kind: type[Codec], frame: Frame) -> bool:
    """Whether there are kernels for this frame."""
    if kind is OneBit:
        return not frame.flags & onebit.ZEROS_KEPT
    return kind in (ThreeLC, Int8, Stoch3, TernGrad, QSGDDoubleSqueeze, TopK, Threshold)


def alike(codec: Codec) -> Hashable:
    """What codecs must have in common for one batch: everything, but for scales that `terngrad` was given."""
    if type(codec) is TernGrad:
        return TernGrad, *(getattr(codec, field.name) for field in fields(codec) if field.name != "scale")
    return codec


def start(
    codecs: Sequence[Codec],
    values: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor] | None,
    draws: Sequence[Draws | None],
    workspace: DeviceWorkspace,
) -> Pending | Selected:
    """Queues the encoding of flat, non-empty tensors of one type on one device, each by its codec; all are `alike`."""
    codec = codecs[0]
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
        case Stoch3():
            keys = [key_of(one) for one in draws]
            return encode_stochastic(values, keys=keys, packing=codec.packing, **shared)
        case TernGrad():
            return encode_stochastic(
                values,
                keys=[key_of(one) for one in draws],
                packing=codec.packing,
                clip=codec.clip,
                centred=codec.sigma == "mean",
                min_spread=stochastic.MIN_SPREAD,
                scales=[one.scale for one in codecs if isinstance(one, TernGrad)],
                **shared,
            )
        case TopK():
            ks = [codec.count(tensor.numel()) for tensor in values]
            return encode_top(values, ks=ks, form=_form(codec, values[0].dtype), **shared)
        case Threshold():
            return encode_from(
                values,
                bound=None if codec.tau is None else codec.least(_NUMPY_TYPES[values[0].dtype]),
                samples=[codec.sample_size(tensor.numel()) for tensor in values],
                fraction=codec.fraction,
                signs=codec.sends_signs,
                form=_form(codec, values[0].dtype),
                **shared,
            )
    raise TypeError(f"{codec.id} has no GPU kernels")


def _form(codec: Sparse, dtype: torch.dtype) -> Callable[[int, int], Form]:
    """How the positions of some of a tensor's values travel."""

    def form(size: int, count: int) -> Form:
        body_nbytes = -(-count // 8) if codec.sends_signs else count * dtype.itemsize
        return Form(codec.takes_bitmap(size, count, body_nbytes), sparse.index_width(size))

    return form


def packed(codec: Codec, size: int, sent: Sent | Chosen) -> Packed | NonFiniteError:
    """What one tensor of a batch, of `size` values, became; an error that is not raised where it was refused.

    Raises:
        ConfigError: `terngrad` was given a scale below the tensor's own.
    """
    try:
        if isinstance(codec, ThreeLC) and isinstance(sent, Sent) and not sent.finite:
            raise NonFiniteError(non_finite(sent.largest, codec.sparsity))
        require_finite_magnitude(sent.largest)
    except NonFiniteError as error:
        return error
    if isinstance(sent, Chosen):
        if sent.bitmap:
            payload = np.concatenate((sent.places, sent.body))
        else:
            payload = sparse.index_payload(size, sent.num_sent, sent.places, sent.body)
        signs = isinstance(codec, Sparse) and codec.sends_signs
        flags = (sparse.BITMAP if sent.bitmap else 0) | (sparse.SIGNS if signs else 0)
        return Packed(payload, (sent.threshold,) if signs else (), int(flags))
    match codec:
        case ThreeLC():
            return Packed(sent.payload, (sent.scale,), codec.flags)
        case TernGrad():
            stochastic.check_covers(codec.scale, sent.scale, sent.limit)
    two_bit = isinstance(codec, Stoch3 | TernGrad) and codec.packing == "2bit"
    return Packed(sent.payload, (sent.scale,), int(stochastic.TWO_BIT) if two_bit else 0)


def limit_of(codec: TernGrad, values: torch.Tensor, workspace: DeviceWorkspace) -> float:
    """The largest magnitude after clipping, of flat, non-empty `values`. Raises NonFiniteError."""
    workspace.follow()
    with workspace.running():
        batch = Batch([values], None, per_byte=1, workspace=workspace)
        limits = largest = batch.largest()
        if codec.clip:
            centred, spread = codec.sigma == "mean", stochastic.MIN_SPREAD
            limits = clipped_at(batch, largest, codec.clip, centred=centred, min_spread=spread)
        both = torch.cat([largest, limits])
    workspace.synchronize()
    found = both.tolist()
    require_finite_magnitude(found[0])
    return float(found[1])


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
    elif kind in (TopK, Threshold):
        with scratch() as space:
            positions, chosen = sparse.read(frame, space)
            scatter(positions, chosen, out=out, accumulate=accumulate, workspace=workspace)
    elif kind is OneBit:
        scale = onebit.scale_of(frame)
        decode_signs(frame.payload, scale=scale, out=out, accumulate=accumulate, workspace=workspace)
    else:
        scale = stochastic.scale_of(frame)
        if frame.flags & stochastic.TWO_BIT:
            decode_two_bit(frame.payload, scale=scale, out=out, accumulate=accumulate, workspace=workspace)
        else:
            decode_ternary(
                frame.payload, scale=scale, out=out, zero_run=False, accumulate=accumulate, workspace=workspace
            )
