"""Tensors on a GPU: who encodes and decodes them there, many of them at once, and what is said where nobody does.

A codec with kernels (`device_coders`) leaves the tensor where it is; only compressed bytes cross to the host. Any
other codec, or a machine without Triton, gets a copy of the whole tensor on the host: that works and costs, so it is
said once for each codec and direction, as a warning.

Encoding starts on a stream of its own and goes on while the caller computes: `Encoding(...)` queues the work,
`.frames()` waits for it. Between the two the tensors must not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from thinwire.codecs.base import Codec, Draws, Encoded, Packed, Tensor
from thinwire.codecs.context import Context
from thinwire.codecs.tensors import DeviceFlat, flatten, flatten_on_device, store_tensor
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels import triton

if TYPE_CHECKING:
    from thinwire.codecs.stochastic import TernGrad
    from thinwire.kernels.triton.pending import Pending, Sent
    from thinwire.kernels.triton.select import Chosen, Selected
    from thinwire.kernels.triton.workspace import DeviceWorkspace

KERNEL_DEVICES = frozenset({"cuda"})
"""Types of devices that the kernels run on."""

# fp32 sends the values as they are: on the host nothing more crosses than has to.
_NOTHING_LOST = frozenset({"fp32"})

_said: set[str] = set()
_idle: dict[torch.device, list[DeviceWorkspace]] = {}


def takes(codec: Codec, device: torch.device) -> bool:
    """Whether `codec` encodes tensors on `device` there; says once why not."""
    reason = _missing(device)
    if reason is None:
        from thinwire.codecs import device_coders

        if device_coders.encodes(codec):
            return True
        reason = f"{codec.id} (as configured) has no GPU kernels"
    if codec.id not in _NOTHING_LOST:
        say_once(
            f"{reason}: tensors on {device.type} are encoded on the CPU. Every encode copies the whole tensor to the "
            "host (4 bytes a value, where the frame holds far fewer) and waits for it"
        )
    return False


def warn_of_host_context(context: Context, device: torch.device) -> None:
    """Says once that a context keeps its residual on the host, although its tensors come from a GPU."""
    if takes(context.codec, device):
        say_once(
            f"a context of {context.codec.id} was made for a tensor on the CPU and gets one on {device.type}: every "
            "encode copies the whole tensor to the host and waits for it. Make contexts from tensors on the GPU"
        )


def encode(codec: Codec, tensor: torch.Tensor) -> bytes:
    """As `codec.encode(tensor)`, where the tensor lies."""
    entry = _Entry(0, "the tensor", flatten_on_device(tensor), None, codec, codec.draws(0, "", 0))
    return _Group([entry]).finish()[0].frame


def local_scale(codec: TernGrad, tensor: torch.Tensor) -> float:
    """As `codec.local_scale(tensor)`, where the tensor lies; only the scale comes to the host."""
    from thinwire.codecs import device_coders

    workspace = _take(tensor.device)
    try:
        return device_coders.limit_of(codec, flatten_on_device(tensor).values, workspace)
    finally:
        _idle[tensor.device].append(workspace)


def encode_all(contexts: Sequence[Context], tensors: Sequence[Tensor]) -> list[bytes]:
    """Encodes many tensors, each with its context; on a GPU by few launches and with one wait for all of them.

    Args:
        contexts: on the host or on GPUs, of any codecs.
        tensors: one for each context.

    Returns:
        Their frames, equal to those of `context.encode(tensor)` one after the other.

    Raises:
        NonFiniteError: NaN or Inf in one of them. On a GPU then no residual changes of a tensor encoded with it.
        ConfigError: a tensor does not fit its context, or there are more of the one than of the other.

    Example:
        >>> import torch, thinwire as tw
        >>> codec, tensors = tw.codec("3lc"), [torch.ones(3), torch.zeros(4)]
        >>> frames = encode_all([codec.context(t) for t in tensors], tensors)
        >>> [tw.decode(frame).tolist() for frame in frames]
        [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    """
    return Encoding(contexts, tensors).frames()


class Encoding:
    """Tensors on their way to frames: queued by the constructor, waited for by `frames`.

    Tensors on the host are encoded at once. Args and errors as for `encode_all`; NonFiniteError of tensors on a GPU
    comes from `frames`.
    """

    def __init__(self, contexts: Sequence[Context], tensors: Sequence[Tensor]) -> None:
        if len(contexts) != len(tensors):
            raise ConfigError(f"{len(contexts)} contexts for {len(tensors)} tensors; there must be one for each")
        self._contexts = contexts
        self._frames: dict[int, bytes] = {}
        groups: dict[Hashable, list[_Entry]] = {}
        for index, (context, tensor) in enumerate(zip(contexts, tensors, strict=True)):
            if context.on_host:
                self._frames[index] = context.encode(tensor)
                continue
            flat = _flatten_to(context.device, tensor, context.name)
            context.check(flat)
            residual, codec = None if context.residual is None else context.residual.view(-1), context.codec
            draws = codec.draws(context.seed, context.name, context.step)
            key = (_alike(codec), context.device, flat.values.dtype)
            groups.setdefault(key, []).append(_Entry(index, context.name, flat, residual, codec, draws))
        self._groups = [_Group(entries) for entries in groups.values()]

    def frames(self) -> list[bytes]:
        """Waits for the compressed bytes and returns the frames, in the order of the tensors. Call once."""
        for group in self._groups:
            for index, encoded in group.finish().items():
                self._contexts[index].sent(encoded.payload_nbytes)
                self._frames[index] = encoded.frame
        return [self._frames[index] for index in range(len(self._contexts))]


def unpack(kind: type[Codec], frame: Frame, out: torch.Tensor, accumulate: bool) -> bool:
    """Fills `out` on its device; False where that has to be done on the host, which is then said once.

    Raises:
        FrameError: the payload is damaged; `out` is untouched.
    """
    reason = _missing(out.device)
    if reason is None:
        from thinwire.codecs import device_coders

        if device_coders.decodes(kind, frame):
            _unpack(kind, frame, out, accumulate)
            return True
        reason = f"{kind.id} (as configured by the sender) has no GPU kernels"
    if kind.id not in _NOTHING_LOST:
        say_once(
            f"{reason}: its frames are decoded on the CPU, and the whole tensor is copied to {out.device.type} "
            "(4 bytes a value, where the frame held far fewer)"
        )
    return False


def _unpack(kind: type[Codec], frame: Frame, out: torch.Tensor, accumulate: bool) -> None:
    from thinwire.codecs import device_coders

    wide = torch.float64 if frame.dtype == "fp64" else torch.float32
    workspace = _take(out.device)
    try:
        if out.dtype == wide and out.is_contiguous():
            device_coders.unpack(kind, frame, out.detach().view(-1), accumulate, workspace)
        else:
            values = torch.empty(frame.size, dtype=wide, device=out.device)
            device_coders.unpack(kind, frame, values, False, workspace)
            store_tensor(out, values, accumulate)
    finally:
        _idle[out.device].append(workspace)


class _Entry(NamedTuple):
    """One tensor to encode, where its frame goes in the list, and its residual on the device."""

    place: int
    name: str
    flat: DeviceFlat
    residual: torch.Tensor | None
    codec: Codec
    draws: Draws | None


class _Group:
    """Tensors that the same launches encode: of like codecs, device and type, with residuals or without."""

    def __init__(self, entries: list[_Entry]) -> None:
        from thinwire.codecs import device_coders

        self._entries = entries
        self._full = [entry for entry in entries if entry.flat.values.numel()]
        self._pending: Pending | Selected | None = None
        if self._full:
            self._workspace = _take(self._full[0].flat.values.device)
            self._pending = device_coders.start(
                [entry.codec for entry in self._full],
                [entry.flat.values for entry in self._full],
                [entry.residual for entry in self._full if entry.residual is not None] or None,
                [entry.draws for entry in self._full],
                self._workspace,
            )

    def finish(self) -> dict[int, Encoded]:
        """The frames, by the index of their tensor."""
        from thinwire.codecs import device_coders

        if self._pending is None:
            return {entry.place: self._framed(entry, Packed(b"")) for entry in self._entries}
        try:
            packed: dict[int, Packed | NonFiniteError] = {entry.place: Packed(b"") for entry in self._entries}
            finished: Sequence[Sent | Chosen] = self._pending.finish()
            for entry, sent in zip(self._full, finished, strict=True):
                packed[entry.place] = device_coders.packed(entry.codec, entry.flat.values.numel(), sent)
            return {entry.place: self._framed(entry, packed[entry.place]) for entry in self._entries}
        finally:
            _idle[self._workspace.device].append(self._workspace)

    def _framed(self, entry: _Entry, packed: Packed | NonFiniteError) -> Encoded:
        if isinstance(packed, NonFiniteError):
            return entry.codec.refused(packed, entry.name, entry.flat.dtype, entry.flat.shape)
        return entry.codec.framed(packed, entry.flat.dtype, entry.flat.shape)


def _alike(codec: Codec) -> Hashable:
    from thinwire.codecs import device_coders

    return device_coders.alike(codec)


def _flatten_to(device: torch.device, tensor: Tensor, name: str) -> DeviceFlat:
    """The flat values on `device`, wherever they came from."""
    if isinstance(tensor, torch.Tensor):
        return flatten_on_device(tensor.to(device), name)
    flat = flatten(tensor, name)
    return DeviceFlat(torch.from_numpy(flat.values).to(device), flat.dtype, flat.shape)


def _missing(device: torch.device) -> str | None:
    """Why no kernel runs on `device`, or None."""
    return triton.missing() if device.type in KERNEL_DEVICES else f"there are no kernels for {device.type} devices"


def _take(device: torch.device) -> DeviceWorkspace:
    """A workspace that nothing uses any more; taking from a list is atomic, so threads never share one."""
    from thinwire.kernels.triton.workspace import DeviceWorkspace

    try:
        workspace = _idle.setdefault(device, []).pop()
    except IndexError:
        return DeviceWorkspace(device)
    workspace.synchronize()  # a decode that was not waited for may still read what was uploaded
    return workspace


def say_once(text: str) -> None:
    """Warns of what something costs, the first time."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, UserWarning, stacklevel=4)
