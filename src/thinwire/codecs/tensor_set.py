"""Encodes, checks and adds the tensors that share a message, with as few kernel calls as possible.

A call into a kernel costs more than the arithmetic of a small tensor, and a model has dozens. A tensor's context
decides among four ways:

    ternary, host    3LC in the host's memory: one kernel call for all
    ternary, GPU     3LC on a GPU: one batch of launches for all
    vectors          values in the message's batch: one array for all
    one by one       all other tensors; those on a GPU share launches too (`encoding.py`)

Frames, residuals and sums have the same bits in every way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire import frames as framing
from thinwire.codecs.base import Context
from thinwire.codecs.decoding import CheckedFrame, Values, fill_all
from thinwire.codecs.encoding import encode_all
from thinwire.codecs.flats import Flats
from thinwire.codecs.lag import LagBound
from thinwire.codecs.registry import open_parsed
from thinwire.codecs.tensors import off_host
from thinwire.codecs.ternary_batch import TernaryBatch, takes
from thinwire.codecs.ternary_device import DeviceTernary
from thinwire.errors import FrameError
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import NARROW, rounded

Checked: TypeAlias = CheckedFrame | EncodedTensor | None
"""A received tensor: checked, or raw bytes for a kernel call that decodes them; None for an empty frame."""

MAX_SUBSETS = 256
"""Subsets that are kept; messages hold a few combinations of tensors, and sets of further ones are made anew."""


class TensorSet:
    """Tensors with their contexts. Their values are given as `Flats`, one for each context.

    Args:
        contexts: of the tensors.
        batched: places of the tensors in the message's batch.
    """

    def __init__(self, contexts: Sequence[Context], batched: Collection[int] = ()) -> None:
        self.contexts = contexts
        self._subsets: dict[tuple[int, ...], TensorSet] = {}
        self._is_narrow: dict[int, bool] = {}
        groups: defaultdict[object, list[int]] = defaultdict(list)
        for place, context in enumerate(contexts):
            if place in batched:
                self._is_narrow[place] = context.codec.id == NARROW
            elif takes(context):
                groups[None if context.on_host else (context.codec, context.device)].append(place)
        self._ternary: list[tuple[Sequence[int], TernaryBatch]] = []
        for key, places in groups.items():
            some = [contexts[place] for place in places]
            self._ternary.append((places, TernaryBatch(some) if key is None else DeviceTernary(some)))

    def at(self, places: Sequence[int]) -> TensorSet:
        """Returns the subset of tensors at `places`, which ascend."""
        if len(places) == len(self.contexts):
            return self
        key = tuple(places)
        if key not in self._subsets:
            if len(self._subsets) >= MAX_SUBSETS:
                self._subsets.clear()
            batched = [index for index, place in enumerate(key) if place in self._is_narrow]
            self._subsets[key] = TensorSet([self.contexts[place] for place in key], batched)
        return self._subsets[key]

    # ---- encode

    def encode(self, values: Flats) -> list[EncodedTensor]:
        """Encodes the values; unsent values stay in the contexts' residuals.

        Raises:
            NonFiniteError: NaN or Inf in one tensor. Tensors that share its kernel call are unchanged.
        """
        made = self.encode_together(values)
        left = [place for place, frame in enumerate(made) if frame is None]
        if left:
            given = values.at(left).tensors()
            for place, each in zip(left, given, strict=True):
                if (narrow := self._is_narrow.get(place)) is not None:  # the error names the tensor
                    BatchedTensor.of(each.cpu().numpy(), self.contexts[place].name, narrow=narrow)
            contexts = [self.contexts[place] for place in left]
            shaped = [each.view(context.shape) for context, each in zip(contexts, given, strict=True)]
            for place, frame in zip(left, encode_all(contexts, shaped), strict=True):
                made[place] = frame
        return [frame for frame in made if frame is not None]

    def encode_together(
        self,
        values: Flats,
        minus: Flats | None = None,
        *,
        outs: Flats | None = None,
        bounds: Sequence[LagBound | None] = (),
    ) -> list[EncodedTensor | None]:
        """As `encode`; frames are None for tensors that go one by one, and for those of a call that finds NaN or Inf.

        Args:
            values: to encode.
            minus: tensors that are subtracted from the values first.
            outs: tensors in the host's memory to which the decoded frames are added; may be those of `minus`.
            bounds: on the lag, which choose the sparsity multipliers in place of the contexts' own.
        """
        made: list[EncodedTensor | None] = [None] * len(self.contexts)
        for places, ternary in self._ternary:
            at = values.at(places)
            if at.device == ternary.device and not at.is_wide:
                frames = ternary.encode(
                    at.addresses,
                    None if outs is None else outs.at(places).addresses,
                    [bounds[place] for place in places] if bounds else (),
                    minus=None if minus is None else minus.at(places).addresses,
                )
                for place, frame in zip(places, frames or (), strict=False):
                    made[place] = frame
        for narrow in {*self._is_narrow.values()}:
            places = [place for place, each in self._is_narrow.items() if each == narrow]
            at = values.at(places)
            whole = at.gather()
            if minus is not None:
                whole -= minus.at(places).gather()
            whole = rounded(whole) if narrow else whole
            if not np.isfinite(whole).all():
                continue
            if outs is not None:
                outs.at(places).scatter(whole, accumulate=True)
            for place, size, end in zip(places, at.sizes.tolist(), np.cumsum(at.sizes).tolist(), strict=True):
                made[place] = vector = BatchedTensor(whole[end - size : end], narrow)
                self.contexts[place].sent(len(vector))
        return made

    # ---- check, add, store

    def check(self, frames: Sequence[EncodedTensor]) -> list[Checked]:
        """Returns the frames to add or store; None for an empty frame, and where the sender's tensor was not finite.

        Raises:
            FrameError: a frame is damaged or does not fit its tensor.
        """
        checked: list[Checked] = list(frames)
        known: set[int] = set()
        for places, ternary in self._ternary:
            right = ternary.check([_bytes(frames[place]) for place in places])
            known.update(place for place, each in zip(places, right, strict=True) if each)
        for place, frame in enumerate(frames):
            if isinstance(frame, BatchedTensor):
                narrow = self._is_narrow.get(place)
                if narrow is None or not self._fits(place, frame) or frame.narrow > narrow:
                    self._refuse(place, frame)
            elif place not in known:
                checked[place] = self._open(place, frame) if len(frame) else None
        return checked

    def add(self, checked: Sequence[Checked], into: Flats, counts: NDArray[np.int64] | None = None) -> list[int]:
        """Adds received tensors to sums; the first of a sum overwrites it.

        Args:
            checked: one for each tensor, from `check`; or raw frames, which are checked and added in one pass.
            into: the sums.
            counts: the number of tensors in each sum, updated here; None: all sums have begun.

        Returns:
            Each tensor's payload size on the wire, in bytes; 0 without a frame.

        Raises:
            FrameError: a payload is damaged. Its sum is unchanged; others may have changed.
        """
        counts = np.ones(len(checked), np.int64) if counts is None else counts
        begun, done = counts > 0, [0] * len(checked)
        for places, ternary in self._ternary:
            at = into.at(places)
            if at.device == ternary.device and not at.is_wide:
                raw = [each if isinstance(each := checked[p], bytes | memoryview) else b"" for p in places]
                nbytes = ternary.decode(raw, at.addresses, begun[places])
                for place, size in zip(places, nbytes, strict=True):
                    done[place] = size
        self._add_vectors(checked, into, begun, done)
        counts += np.array(done, np.int64) > 0
        opened: list[tuple[int, CheckedFrame]] = []
        for place, each in enumerate(checked):
            if not done[place] and _is_present(each):
                frame = each if isinstance(each, CheckedFrame) else self._open(place, _bytes(each))
                if frame is None:
                    raise FrameError(f"{self.contexts[place].name}: the sender's tensor held NaN or Inf")
                opened.append((place, frame))
        if not opened:
            return done
        views, on_device = into.views(), list[tuple[CheckedFrame, Values, bool]]()
        for place, frame in opened:
            if off_host(view := views[place]):
                on_device.append((frame, view.view(self.contexts[place].shape), bool(begun[place])))
            else:
                with naming(self.contexts[place]):
                    frame.decode_flat(np.asarray(view), accumulate=bool(begun[place]))
            counts[place] += 1
            done[place] = frame.payload_nbytes
        if on_device:
            fill_all(*zip(*on_device, strict=True))
        return done

    def store(self, checked: Sequence[Checked], into: Flats) -> list[int]:
        """As `add`, but each received tensor overwrites."""
        return self.add(checked, into, np.zeros(len(checked), np.int64))

    def _add_vectors(self, checked: Sequence[Checked], into: Flats, begun: NDArray[np.bool_], done: list[int]) -> None:
        came = {place: each for place, each in enumerate(checked) if isinstance(each, BatchedTensor)}
        for place, vector in came.items():
            if not self._fits(place, vector):
                self._refuse(place, vector)
        adds = begun.tolist() if came else []
        for accumulate in (False, True) if came else ():
            places = [place for place in came if adds[place] == accumulate]
            if places:
                whole = np.concatenate([came[place].values for place in places])
                into.at(places).scatter(whole, accumulate=accumulate)
            for place in places:
                done[place] = len(came[place])

    def _fits(self, place: int, vector: BatchedTensor) -> bool:
        context = self.contexts[place]
        return vector.fits(context.size, "fp64" if context.dtype == "fp64" else "fp32")

    def _refuse(self, place: int, vector: BatchedTensor) -> None:
        context = self.contexts[place]
        raise FrameError(
            f"{context.name}: {vector.values.size} values came in a {'bf16' if vector.narrow else 'fp32'} batch; "
            f"the tensor has shape {context.shape}, and {context.codec.id!r} was agreed on"
        )

    def _open(self, place: int, frame: bytes | memoryview) -> CheckedFrame | None:
        """Checks a frame's header, then undoes its zstd stage; None where the sender's tensor was not finite."""
        context = self.contexts[place]
        with naming(context):
            parsed = framing.parse(frame, copy=False)
            if parsed.shape != context.shape or (parsed.dtype == "fp64") != (context.dtype == "fp64"):
                raise FrameError(
                    f"a frame of shape {parsed.shape} and dtype {parsed.dtype} came; the tensor has shape "
                    f"{context.shape} and dtype {context.dtype}"
                )
            return None if parsed.non_finite else open_parsed(parsed)


@contextmanager
def naming(context: Context) -> Iterator[None]:
    """Adds the tensor's name to a FrameError."""
    try:
        yield
    except FrameError as error:
        raise FrameError(f"{context.name}: {error}") from error


def _is_present(each: Checked) -> bool:
    return isinstance(each, CheckedFrame) or bool(each is not None and len(each))


def _bytes(each: Checked) -> bytes | memoryview:
    return each if isinstance(each, bytes | memoryview) else b""
