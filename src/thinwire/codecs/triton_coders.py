"""The schemes with Triton kernels: which kernels each calls. Importing this file imports Triton.

A scheme that is not in `CODERS` runs on the CPU, and so do the options that its coder refuses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from thinwire.codecs import blocktopk, floats, int8, signs, sparse, stochastic, threelc
from thinwire.codecs.blocktopk import BlockTopK
from thinwire.codecs.device_coder import DeviceCoder, Entry, Pending
from thinwire.codecs.floats import BF16
from thinwire.codecs.int8 import Int8
from thinwire.codecs.levels import Votes, width_of
from thinwire.codecs.scheme import Payload, Scheme
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.signs import OneBit
from thinwire.codecs.stochastic import TernGrad
from thinwire.codecs.threelc import ThreeLC
from thinwire.codecs.topk import TopK
from thinwire.errors import NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.contract import non_finite, require_finite_magnitude
from thinwire.kernels.numba.bins import round_to_bins
from thinwire.kernels.numba.blocktopk import Blocks
from thinwire.kernels.numba.casts import BFLOAT_MAX, finite_halves
from thinwire.kernels.triton.batch import Batch, Sent
from thinwire.kernels.triton.blocks import Picked, SelectedBlocks
from thinwire.kernels.triton.dense import decode_dense, encode_int8, encode_signs
from thinwire.kernels.triton.halves import decode_bfloat, encode_bfloat
from thinwire.kernels.triton.integers import decode_integers
from thinwire.kernels.triton.select import Chosen, Form, Selected, scatter
from thinwire.kernels.triton.stochastic import clipped_at, decode_two_bit, encode_stochastic
from thinwire.kernels.triton.ternary import encode_ternary
from thinwire.kernels.triton.ternary_decode import decode_ternary
from thinwire.kernels.triton.workspace import DeviceWorkspace

_NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def _payloads(frames: Sequence[Frame]) -> list[bytes | memoryview]:
    return [frame.payload for frame in frames]


def _scales(frames: Sequence[Frame]) -> list[float]:
    return [frame.scales[0] for frame in frames]


class _ThreeLC(DeviceCoder[ThreeLC]):
    def start(self, scheme: ThreeLC, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        return encode_ternary(
            values,
            sparsity=scheme.multiplier_at(entries[0].step),
            layout=scheme.layout,
            zero_run=scheme.zero_run,
            **given,
        )

    def payload(self, scheme: ThreeLC, entry: Entry, sent: Sent) -> Payload:
        if not sent.finite:
            raise NonFiniteError(non_finite(sent.largest, scheme.multiplier_at(entry.step)))
        return Payload(sent.payload, (sent.scale,), scheme.flags)

    def decode(self, frames: Sequence[Frame], space: Scratch, *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        flags = frames[0].flags
        decode_ternary(
            _payloads(frames),
            scales=_scales(frames),
            layout="partition" if flags & threelc.PARTITION else "stride",
            zero_run=bool(flags & threelc.ZERO_RUN),
            outs=outs,
            **into,
        )


class _BF16(DeviceCoder[BF16]):
    def start(self, scheme: BF16, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        return encode_bfloat(values, most=BFLOAT_MAX, **given)

    def payload(self, scheme: BF16, entry: Entry, sent: Sent) -> Payload:
        if not sent.finite:
            raise NonFiniteError(floats.ABOVE_BFLOAT if math.isfinite(sent.largest) else floats.NOT_FINITE)
        return Payload(sent.payload)

    def decode(self, frames: Sequence[Frame], space: Scratch, *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        decode_bfloat(
            [finite_halves(each.payload, kind="bfloat", size=each.size) for each in frames], outs=outs, **into
        )


class _Int8(DeviceCoder[Int8]):
    def start(self, scheme: Int8, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        largest_scale = float(int8.largest_scale(_NUMPY_TYPES[values[0].dtype]))
        return encode_int8(values, largest_scale=largest_scale, **given)

    def decode(self, frames: Sequence[Frame], space: Scratch, *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        dtype = _NUMPY_TYPES[outs[0].dtype]
        levels, scales = zip(*(int8.levels_of(frame, dtype) for frame in frames), strict=True)
        decode_dense(levels, per_byte=1, scales=scales, outs=outs, **into)


class _Votes(DeviceCoder[Votes]):
    """Servers encode votes, on the CPU."""

    alone = True

    def encodes(self, scheme: Votes) -> bool:
        return False

    def start(self, scheme: Votes, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        raise NotImplementedError("votes are encoded on the CPU")

    def decode(self, frames: Sequence[Frame], space: Scratch, *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        [frame], [out] = frames, outs
        _, workers = Votes.unpacked(frame, space)  # which finds damage; only the packed votes go up
        decode_integers(frame.payload, width=width_of(workers), top=workers, scale=frame.scales[0], out=out, **into)


class _OneBit(DeviceCoder[OneBit]):
    def encodes(self, scheme: OneBit) -> bool:
        return scheme.zeros == "plus"

    def decodes(self, frame: Frame) -> bool:
        return not frame.flags & signs.ZEROS_KEPT

    def start(self, scheme: OneBit, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        return encode_signs(values, norm=scheme.norm, **given)

    def decode(self, frames: Sequence[Frame], space: Scratch, *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        decode_dense(_payloads(frames), per_byte=8, scales=_scales(frames), outs=outs, **into)


class _TernGrad(DeviceCoder[TernGrad]):
    def start(self, scheme: TernGrad, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        return encode_stochastic(
            values,
            keys=[entry.step.key for entry in entries],
            packing=scheme.packing,
            clip=scheme.clip,
            centred=scheme.sigma == "mean",
            min_spread=stochastic.MIN_SPREAD,
            scales=[scheme.asked_scale(entry.step) for entry in entries],
            **given,
        )

    def payload(self, scheme: TernGrad, entry: Entry, sent: Sent) -> Payload:
        payload = super().payload(scheme, entry, sent)
        stochastic.check_covers(scheme.asked_scale(entry.step), sent.scale, sent.limit)
        return payload

    def decode(self, frames: Sequence[Frame], space: Scratch, *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        if frames[0].flags & stochastic.TWO_BIT:
            decode_two_bit(_payloads(frames), scales=_scales(frames), outs=outs, **into)
        else:
            decode_ternary(_payloads(frames), scales=_scales(frames), zero_run=False, outs=outs, **into)

    def local_scale(self, scheme: TernGrad, values: torch.Tensor, workspace: DeviceWorkspace) -> float:
        workspace.follow()
        with workspace.running():
            batch = Batch([values], None, per_byte=1, workspace=workspace)
            limits = largest = batch.largest()
            if scheme.clip:
                centred, spread = scheme.sigma == "mean", stochastic.MIN_SPREAD
                limits = clipped_at(batch, largest, scheme.clip, centred=centred, min_spread=spread)
            both = torch.cat([largest, limits])
        workspace.synchronize()
        found = both.tolist()
        require_finite_magnitude(found[0])
        return float(found[1])


class _TopK(DeviceCoder[TopK]):
    """Values are selected on the device; frames are checked and positions expanded on the host."""

    alone = True

    def start(self, scheme: TopK, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        itemsize = values[0].dtype.itemsize

        def form(size: int, count: int) -> Form:
            return Form(scheme.takes_bitmap(size, count, count * itemsize), sparse.index_width(size))

        return Selected(values, ks=[scheme.count(tensor.numel()) for tensor in values], form=form, **given)

    def payload(self, scheme: TopK, entry: Entry, sent: Chosen) -> Payload:
        require_finite_magnitude(sent.largest)
        if sent.bitmap:
            return Payload(np.concatenate((sent.places, sent.body)), (), sparse.BITMAP)
        return Payload(sparse.index_payload(entry.flat.values.numel(), sent.num_sent, sent.places, sent.body))

    def decode(self, frames: Sequence[Frame], space: Scratch, *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        positions, chosen = TopK.read(frames[0], space)
        scatter(positions, chosen, out=outs[0], **into)


class _BlockTopK(DeviceCoder[BlockTopK]):
    """Values are selected on the device; their levels are found, and their positions coded, on the host."""

    def encodes(self, scheme: BlockTopK) -> bool:
        return scheme.transform is None

    def decodes(self, frame: Frame) -> bool:
        return not frame.flags & blocktopk.DCT

    def start(self, scheme: BlockTopK, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        return SelectedBlocks(
            values,
            blocks=[self._blocks(scheme, entry) for entry in entries],
            most=blocktopk.largest_allowed(_NUMPY_TYPES[values[0].dtype]),
            levels=lambda chosen, codes: round_to_bins(chosen, scheme.bits, codes),
            num_levels=1 << scheme.bits,
            **given,
        )

    def payload(self, scheme: BlockTopK, entry: Entry, sent: Picked) -> Payload:
        require_finite_magnitude(sent.largest)
        blocktopk.require_below(sent.largest, blocktopk.largest_allowed(_NUMPY_TYPES[entry.flat.values.dtype]))
        assert sent.rounded is not None  # only what was refused above is not rounded
        return scheme.coded(self._blocks(scheme, entry), *sent.rounded)

    alone = True

    def decode(self, frames: Sequence[Frame], space: Scratch, *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        positions, values, _ = BlockTopK.sent(frames[0], space)
        scatter(positions, values, out=outs[0], **into)

    @staticmethod
    def _blocks(scheme: BlockTopK, entry: Entry) -> Blocks:
        return blocktopk.blocks_of(entry.flat.shape, scheme.block, scheme.k, scheme.layout == "tiles")


CODERS: Mapping[type[Scheme], DeviceCoder[Any]] = {
    ThreeLC: _ThreeLC(),
    BF16: _BF16(),
    Int8: _Int8(),
    Votes: _Votes(),
    OneBit: _OneBit(),
    TernGrad: _TernGrad(),
    TopK: _TopK(),
    BlockTopK: _BlockTopK(),
}
"""By class; a subclass is another scheme."""
