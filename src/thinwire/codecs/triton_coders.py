"""The schemes with Triton kernels: which kernels each calls. Importing this file imports Triton.

A scheme that is not in `CODERS` runs on the CPU, and so do the options that its coder refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from thinwire.codecs import int8, onebit, sparse, stochastic, threelc
from thinwire.codecs.device import DeviceCoder, Entry, Pending
from thinwire.codecs.int8 import Int8
from thinwire.codecs.onebit import OneBit
from thinwire.codecs.scheme import Payload, Scheme, one_scale
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.sparse import Sparse
from thinwire.codecs.stochastic import QSGDDoubleSqueeze, Stoch3, TernGrad
from thinwire.codecs.threelc import ThreeLC
from thinwire.codecs.threshold import Threshold
from thinwire.codecs.topk import TopK
from thinwire.errors import NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.contract import non_finite, require_finite_magnitude
from thinwire.kernels.triton.batch import Batch
from thinwire.kernels.triton.levels import decode_int8, encode_int8
from thinwire.kernels.triton.pending import Sent
from thinwire.kernels.triton.scatter import scatter
from thinwire.kernels.triton.select import Chosen, Form, encode_from, encode_top
from thinwire.kernels.triton.signs import decode_signs, encode_signs
from thinwire.kernels.triton.stochastic import clipped_at, decode_two_bit, encode_stochastic
from thinwire.kernels.triton.ternary import decode_ternary, encode_ternary
from thinwire.kernels.triton.workspace import DeviceWorkspace

_NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def _values(entries: Sequence[Entry]) -> list[torch.Tensor]:
    return [entry.flat.values for entry in entries]


def _given(entries: Sequence[Entry], workspace: DeviceWorkspace) -> dict[str, Any]:
    """What every encoding kernel takes beside the values."""
    return {
        "residuals": [entry.residual for entry in entries if entry.residual is not None] or None,
        "residual_scale": entries[0].residual_scale,
        "together": entries[0].together,
        "workspace": workspace,
    }


class _ThreeLC(DeviceCoder[ThreeLC]):
    def encodes(self, scheme: ThreeLC) -> bool:
        return scheme.coalesce == "canonical"  # the paper's joins depend on the number of threads

    def start(self, scheme: ThreeLC, entries: Sequence[Entry], workspace: DeviceWorkspace) -> Pending:
        return encode_ternary(
            _values(entries),
            sparsity=scheme.sparsity,
            layout=scheme.layout,
            zero_run=scheme.zero_run,
            paper_literal=scheme.paper_literal,
            **_given(entries, workspace),
        )

    def payload(self, scheme: ThreeLC, entry: Entry, sent: Sent) -> Payload:
        if not sent.finite:
            raise NonFiniteError(non_finite(sent.largest, scheme.sparsity))
        return Payload(sent.payload, (sent.scale,), scheme.flags)

    def decode(
        self, frame: Frame, out: torch.Tensor, accumulate: bool, workspace: DeviceWorkspace, space: Scratch
    ) -> None:
        decode_ternary(
            frame.payload,
            scale=one_scale(frame),
            out=out,
            layout="partition" if frame.flags & threelc.PARTITION else "stride",
            zero_run=bool(frame.flags & threelc.ZERO_RUN),
            accumulate=accumulate,
            workspace=workspace,
        )


class _Int8(DeviceCoder[Int8]):
    def start(self, scheme: Int8, entries: Sequence[Entry], workspace: DeviceWorkspace) -> Pending:
        values = _values(entries)
        largest_scale = float(int8.largest_scale(_NUMPY_TYPES[values[0].dtype]))
        return encode_int8(values, largest_scale=largest_scale, **_given(entries, workspace))

    def payload(self, scheme: Int8, entry: Entry, sent: Sent) -> Payload:
        require_finite_magnitude(sent.largest)
        return Payload(sent.payload, (sent.scale,))

    def decode(
        self, frame: Frame, out: torch.Tensor, accumulate: bool, workspace: DeviceWorkspace, space: Scratch
    ) -> None:
        levels, scale = int8.levels_of(frame, _NUMPY_TYPES[out.dtype])
        decode_int8(levels, scale=scale, out=out, accumulate=accumulate, workspace=workspace)


class _OneBit(DeviceCoder[OneBit]):
    def encodes(self, scheme: OneBit) -> bool:
        return scheme.zeros == "plus"

    def decodes(self, frame: Frame) -> bool:
        return not frame.flags & onebit.ZEROS_KEPT

    def start(self, scheme: OneBit, entries: Sequence[Entry], workspace: DeviceWorkspace) -> Pending:
        return encode_signs(_values(entries), norm=scheme.norm, **_given(entries, workspace))

    def payload(self, scheme: OneBit, entry: Entry, sent: Sent) -> Payload:
        require_finite_magnitude(sent.largest)
        return Payload(sent.payload, (sent.scale,))

    def decode(
        self, frame: Frame, out: torch.Tensor, accumulate: bool, workspace: DeviceWorkspace, space: Scratch
    ) -> None:
        decode_signs(frame.payload, scale=one_scale(frame), out=out, accumulate=accumulate, workspace=workspace)


_Trits = TypeVar("_Trits", bound=stochastic.Trits)


class _RandomTrits(DeviceCoder[_Trits], Generic[_Trits]):
    """What the random trits share: the packed form, and how it is read."""

    def start(self, scheme: _Trits, entries: Sequence[Entry], workspace: DeviceWorkspace) -> Pending:
        keys = [entry.step.key for entry in entries]
        return encode_stochastic(_values(entries), keys=keys, packing=scheme.packing, **_given(entries, workspace))

    def payload(self, scheme: _Trits, entry: Entry, sent: Sent) -> Payload:
        require_finite_magnitude(sent.largest)
        return Payload(sent.payload, (sent.scale,), scheme.flags)

    def decode(
        self, frame: Frame, out: torch.Tensor, accumulate: bool, workspace: DeviceWorkspace, space: Scratch
    ) -> None:
        scale = one_scale(frame)
        if frame.flags & stochastic.TWO_BIT:
            decode_two_bit(frame.payload, scale=scale, out=out, accumulate=accumulate, workspace=workspace)
        else:
            decode_ternary(
                frame.payload, scale=scale, out=out, zero_run=False, accumulate=accumulate, workspace=workspace
            )


class _TernGrad(_RandomTrits[TernGrad]):
    def start(self, scheme: TernGrad, entries: Sequence[Entry], workspace: DeviceWorkspace) -> Pending:
        return encode_stochastic(
            _values(entries),
            keys=[entry.step.key for entry in entries],
            packing=scheme.packing,
            clip=scheme.clip,
            centred=scheme.sigma == "mean",
            min_spread=stochastic.MIN_SPREAD,
            scales=[scheme.asked_scale(entry.step) for entry in entries],
            **_given(entries, workspace),
        )

    def payload(self, scheme: TernGrad, entry: Entry, sent: Sent) -> Payload:
        payload = super().payload(scheme, entry, sent)
        stochastic.check_covers(scheme.asked_scale(entry.step), sent.scale, sent.limit)
        return payload

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


class _QSGDDoubleSqueeze(_RandomTrits[QSGDDoubleSqueeze]):
    def encodes(self, scheme: QSGDDoubleSqueeze) -> bool:
        return False  # its scale follows from how many trits came out


_Sparse = TypeVar("_Sparse", bound=Sparse)


class _Selecting(DeviceCoder[_Sparse], Generic[_Sparse]):
    """What schemes share that send some of the values; frames are checked and positions expanded on the host."""

    def payload(self, scheme: _Sparse, entry: Entry, sent: Chosen) -> Payload:
        require_finite_magnitude(sent.largest)
        if sent.bitmap:
            data = np.concatenate((sent.places, sent.body))
        else:
            data = sparse.index_payload(entry.flat.values.numel(), sent.num_sent, sent.places, sent.body)
        flags = (sparse.BITMAP if sent.bitmap else 0) | (sparse.SIGNS if scheme.sends_signs else 0)
        return Payload(data, (sent.threshold,) if scheme.sends_signs else (), flags)

    def decode(
        self, frame: Frame, out: torch.Tensor, accumulate: bool, workspace: DeviceWorkspace, space: Scratch
    ) -> None:
        positions, chosen = sparse.read(frame, space)
        scatter(positions, chosen, out=out, accumulate=accumulate, workspace=workspace)

    def form(self, scheme: _Sparse, dtype: torch.dtype) -> Callable[[int, int], Form]:
        """How the positions of some of a tensor's values travel."""

        def form(size: int, count: int) -> Form:
            body_nbytes = -(-count // 8) if scheme.sends_signs else count * dtype.itemsize
            return Form(scheme.takes_bitmap(size, count, body_nbytes), sparse.index_width(size))

        return form


class _TopK(_Selecting[TopK]):
    def start(self, scheme: TopK, entries: Sequence[Entry], workspace: DeviceWorkspace) -> Pending:
        values = _values(entries)
        ks = [scheme.count(tensor.numel()) for tensor in values]
        return encode_top(values, ks=ks, form=self.form(scheme, values[0].dtype), **_given(entries, workspace))


class _Threshold(_Selecting[Threshold]):
    def start(self, scheme: Threshold, entries: Sequence[Entry], workspace: DeviceWorkspace) -> Pending:
        values = _values(entries)
        dtype = values[0].dtype
        return encode_from(
            values,
            bound=None if scheme.tau is None else scheme.least(_NUMPY_TYPES[dtype]),
            samples=[scheme.sample_size(tensor.numel()) for tensor in values],
            fraction=scheme.fraction,
            signs=scheme.sends_signs,
            form=self.form(scheme, dtype),
            **_given(entries, workspace),
        )


CODERS: Mapping[type[Scheme], DeviceCoder[Any]] = {
    ThreeLC: _ThreeLC(),
    Int8: _Int8(),
    OneBit: _OneBit(),
    Stoch3: _RandomTrits[Stoch3](),
    TernGrad: _TernGrad(),
    QSGDDoubleSqueeze: _QSGDDoubleSqueeze(),
    TopK: _TopK(),
    Threshold: _Threshold(),
}
"""By class; a subclass is another scheme."""
