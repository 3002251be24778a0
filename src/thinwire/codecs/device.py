"""Tensors on a GPU: which schemes have kernels there, and batches of tensors that share launches.

For a scheme with kernels the tensor stays on the GPU; only compressed bytes cross to the host. Other schemes, and
machines without Triton, copy the whole tensor to the host; callers warn of that cost.

`DeviceCoder` (`device_coder.py`) is the interface of a scheme's kernels; `triton_coders.py` lists the schemes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple, TypeGuard

import torch

from thinwire.cautions import caution
from thinwire.codecs.device_coder import DeviceCoder, Entry
from thinwire.codecs.scheme import Encoded, Payload, Scheme
from thinwire.codecs.scratch import ScratchPool
from thinwire.codecs.tensors import is_plain, off_host, refuse_meta, store_tensor
from thinwire.errors import NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels import triton

KERNEL_DEVICES = frozenset({"cuda"})
"""Types of devices that the kernels run on."""

UNCOMPRESSED = frozenset({"fp32"})
"""Codecs that send the values uncompressed: a copy on the host costs no more than the frame itself."""

MAX_PIECE = 1 << 25
"""Most values decoded at once into temporary memory (half precision, views), unless one tensor has more."""

_EMPTY = Payload(b"")


@cache
def coders() -> Mapping[type[Scheme], DeviceCoder]:
    """Returns the schemes that have kernels.

    The first tensor on a GPU imports the table: it imports Triton, which takes a second and may be missing.
    """
    from thinwire.codecs.triton_coders import CODERS

    return CODERS


def why_not(device: torch.device) -> str | None:
    """Returns why no kernel runs on `device`; None where kernels do."""
    return triton.missing() if device.type in KERNEL_DEVICES else f"there are no kernels for {device.type} devices"


def why_not_encoded(scheme: Scheme, device: torch.device) -> str | None:
    """Returns why tensors on `device` are not encoded there; None where they are."""
    if reason := why_not(device):
        return reason
    coder = coders().get(type(scheme))
    return None if coder and coder.encodes(scheme) else f"{scheme.id} (as configured) has no GPU kernels"


def encodes(tensor: object, scheme: Scheme, name: str = "the tensor") -> TypeGuard[torch.Tensor]:
    """Whether a tensor off the host is encoded on its device; warns of the cost if not.

    Raises:
        TypeError: the tensor, called `name`, is on the meta device.
    """
    if not off_host(tensor):
        return False
    refuse_meta(tensor, name)
    reason = why_not_encoded(scheme, tensor.device)
    if reason and scheme.id not in UNCOMPRESSED:
        caution(
            f"{reason}: tensors on {tensor.device.type} are encoded on the CPU. Every encode copies the whole "
            "tensor to the host (4 bytes a value, where the frame holds far fewer) and waits for it"
        )
    return reason is None


def why_not_decoded(scheme: type[Scheme], frame: Frame, device: torch.device) -> str | None:
    """Returns why this frame is not decoded on `device`; None where it is."""
    if reason := why_not(device):
        return reason
    coder = coders().get(scheme)
    return None if coder and coder.decodes(frame) else f"{scheme.id} (as configured by the sender) has no GPU kernels"


class Received(NamedTuple):
    """One frame to decode.

    Args:
        scheme: the class of its codec.
        frame: checked, of a tensor that is not empty.
        out: of its shape, on the device.
        accumulate: whether to add.
    """

    scheme: type[Scheme]
    frame: Frame
    out: torch.Tensor
    accumulate: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the kernels write."""
        return torch.float64 if self.frame.dtype == "fp64" else torch.float32

    @property
    def direct(self) -> bool:
        """Whether the kernels write into the tensor's own memory."""
        return self.out.dtype == self.dtype and is_plain(self.out)

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Frames with equal keys may be decoded together."""
        return self.scheme, self.frame.flags, self.dtype, self.direct, self.accumulate, self.out.device


def decode(received: Sequence[Received], pool: ScratchPool) -> None:
    """Fills tensors, or adds into them, on their devices; frames with equal keys share a few launches.

    Args:
        received: no tensor twice.
        pool: lends workspaces.

    Raises:
        FrameError: a payload is damaged. Its tensor, and those that are decoded with it, are untouched.
    """
    groups: dict[tuple[object, ...], list[Received]] = defaultdict(list)
    for each in received:
        groups[each.batch_key].append(each)
    for group in groups.values():
        for piece in [group] if group[0].direct else _pieces(group):
            _decode_group(piece, pool)


def _pieces(received: Sequence[Received]) -> Iterator[list[Received]]:
    """Cuts frames that are decoded into temporary memory into groups of bounded size."""
    piece: list[Received] = []
    for each in received:
        if piece and sum(one.frame.size for one in piece) + each.frame.size > MAX_PIECE:
            yield piece
            piece = []
        piece.append(each)
    yield piece


def _decode_group(received: Sequence[Received], pool: ScratchPool) -> None:
    scheme, _, out, accumulate = one = received[0]
    frames = [each.frame for each in received]
    if one.direct:
        outs = [each.out.detach().view(-1) for each in received]
    else:
        outs = [torch.empty(frame.size, dtype=one.dtype, device=out.device) for frame in frames]
    with pool.lend_on(out.device) as workspace:
        coders()[scheme].decode(frames, outs=outs, accumulate=accumulate and one.direct, workspace=workspace)
    if not one.direct:
        for each, values in zip(received, outs, strict=True):
            store_tensor(each.out, values, accumulate)


class Batch:
    """Tensors that share launches; the constructor queues them.

    Args:
        entries: one or more, with equal keys. The first one's codec lends the memory until the batch is finished.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        codec = entries[0].codec
        self._entries, self._scheme = entries, codec.scheme
        full = [entry for entry in entries if entry.flat.values.numel()]
        self._pending: Any = None
        self._lent = ExitStack()
        if not full:
            return
        self._coder = coders()[type(self._scheme)]
        values = [entry.flat.values for entry in full]
        with ExitStack() as stack:
            self._pending = self._coder.start(
                self._scheme,
                full,
                values,
                residuals=[entry.residual for entry in full if entry.residual is not None] or None,
                residual_scale=codec.error_scale,
                together=codec.nonfinite == "raise",  # with "skip", NaN or Inf stops only its tensor
                workspace=stack.enter_context(codec.pool.lend_on(values[0].device)),
            )
            self._lent = stack.pop_all()  # until the batch is finished

    def finish(self) -> list[Encoded]:
        """Waits for the compressed bytes and returns the frames, in the order of the entries. Call once.

        Raises:
            NonFiniteError: NaN or Inf in a tensor whose codec does not skip.
            ConfigError: the shared scale is below the tensor's own.
        """
        with self._lent:
            finished = iter(() if self._pending is None else self._pending.finish())
            return [self._encoded(entry, finished) for entry in self._entries]

    def _encoded(self, entry: Entry, finished: Iterator[Any]) -> Encoded:
        """Returns an entry's frame; takes the next finished result unless the entry is empty."""
        codec, flat, _, _, name = entry
        made: Payload | NonFiniteError = _EMPTY
        if flat.values.numel():
            try:
                made = self._coder.payload(self._scheme, entry, next(finished))
            except NonFiniteError as error:
                made = error
        return codec.framed(made, flat, name)
