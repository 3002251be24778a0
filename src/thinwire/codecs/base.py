"""The contract of a codec: tensor ↔ frame.

A codec is a frozen dataclass; its fields are its whole configuration, `config()` is that as JSON and
`tw.codec(**config)` an equal codec. It has no state: what one tensor needs between steps (the residual, the
random stream) lives in a `Context`. A new codec writes `pack` and `unpack` on flat arrays, and registers.

Decoding needs nothing but the frame, so `unpack` and `max_payload_nbytes` are class methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire import frames
from thinwire.codecs import entropy_stage
from thinwire.codecs.scratch import Scratch, scratch
from thinwire.codecs.tensors import Flat, FloatArray, flatten, flatten_on_device, off_host
from thinwire.errors import ConfigError, FrameError, NonFiniteError
from thinwire.frames import Flags, Frame
from thinwire.frames.layout import OPTION_MASK

if TYPE_CHECKING:
    from thinwire.codecs.context import Context

Tensor: TypeAlias = torch.Tensor | NDArray[Any]
Draws: TypeAlias = np.random.Generator
Explained: TypeAlias = dict[str, tuple[Any, str]]
"""The fields of a frame by name: what each holds, as a JSON value, and what that means."""


_ZSTD, _NON_FINITE = int(Flags.ZSTD), int(Flags.NON_FINITE)  # plain integers: an IntFlag costs ten times as much


class Packed(NamedTuple):
    """What a codec makes of a tensor. `payload` may be a view into the workspace, valid until its next use."""

    payload: bytes | memoryview | NDArray[np.uint8]
    scales: tuple[float, ...] = ()
    flags: int = 0


class Encoded(NamedTuple):
    """A frame, and how many of its bytes are the codec's payload: what the papers count."""

    frame: bytes
    payload_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """Turns tensors into frames and back.

    Args:
        entropy: `"zstd"` adds a second stage over the payload, kept where it shrinks; None does not.
        error_feedback: whether a context keeps what was not sent and adds it to the next tensor;
            None means the codec's own default.
        error_scale: the residual is multiplied by it before it is added (1: keep all; 0.1: ECQ-SGD's, 3LC §5).
        nonfinite: `"raise"` refuses NaN and Inf with NonFiniteError; `"skip"` sends a frame that says so,
            for training loops whose loss scaler then makes every worker skip the step.
    """

    id: ClassVar[str]
    keeps_residual: ClassVar[bool] = False
    """Whether contexts keep a residual unless told otherwise."""
    random: ClassVar[bool] = False
    """Whether `pack` draws random numbers."""
    private_options: ClassVar[frozenset[str]] = frozenset()
    """Options that concern one machine alone: peers may differ in them."""
    option_flags: ClassVar[int] = 0
    """The high-byte flags (`Flags.OPTION_A` …) that this codec's frames may carry."""

    entropy: Literal["zstd"] | None = None
    error_feedback: bool | None = None
    error_scale: float = 1.0
    nonfinite: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        if self.entropy not in (None, "zstd"):
            raise ConfigError(f"entropy={self.entropy!r}; allowed are None and 'zstd'")
        if self.nonfinite not in ("raise", "skip"):
            raise ConfigError(f"nonfinite={self.nonfinite!r}; allowed are 'raise' and 'skip'")
        if self.error_feedback not in (None, True, False):
            raise ConfigError(f"error_feedback={self.error_feedback!r}; allowed are None, True and False")
        if not 0.0 <= self.error_scale <= 1.0:
            raise ConfigError(f"error_scale={self.error_scale!r}; it must lie in [0, 1]")

    # ---- what users call

    def config(self) -> dict[str, Any]:
        """Returns the codec as JSON values, with its id; `tw.codec(**config)` is an equal codec."""
        return {"id": self.id, **{field.name: getattr(self, field.name) for field in fields(self)}}

    def encode(self, tensor: Tensor) -> bytes:
        """Returns one self-describing frame. Keeps nothing: for a residual, use a context.

        Raises:
            NonFiniteError: NaN or Inf in the tensor (unless `nonfinite="skip"`), or a scale that overflows.
            TypeError: not a floating-point tensor.
        """
        if off_host(tensor):
            from thinwire.codecs import device

            if device.takes(self, tensor.device):
                return device.encode(self, tensor)
        return self.encode_flat(flatten(tensor), "the tensor", None, self.draws(0, "", 0)).frame

    def context(self, tensor: Tensor, *, name: str = "the tensor", seed: int = 0) -> Context:
        """Returns the state for one tensor in one direction, with a zero residual of the tensor's shape.

        Args:
            tensor: an example; only its shape, dtype and device matter. On a GPU, the residual lives there.
            name: used in error messages, and to give every tensor a random stream of its own.
            seed: of the random stream; workers that average their results must have different ones.
        """
        from thinwire.codecs.context import Context

        if off_host(tensor):
            from thinwire.codecs import device

            if device.takes(self, tensor.device):
                return Context(self, flatten_on_device(tensor), name=name, seed=seed)
        return Context(self, flatten(tensor), name=name, seed=seed)

    @property
    def residual_by_default(self) -> bool:
        """Whether this codec's contexts keep a residual."""
        return self.keeps_residual if self.error_feedback is None else self.error_feedback

    # ---- what a codec writes

    @abstractmethod
    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        """Encodes `flat.values`. Raises NonFiniteError before anything is changed."""

    @classmethod
    @abstractmethod
    def unpack(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        """Fills (or adds into) flat `out` of `frame.size` values. Raises FrameError before `out` is touched."""

    @classmethod
    @abstractmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        """Most bytes a payload of this shape can have before the zstd stage."""

    @classmethod
    @abstractmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        """Fewest bytes a payload of this shape can have before the zstd stage: what a short frame may not claim."""

    @classmethod
    def explain(cls, frame: Frame) -> Explained:
        """Says what the codec's own fields of a checked, non-empty frame mean: scales, option flags, payload.

        For people (`thinwire inspect FRAME`); a codec without it is explained by its header alone. The payload is that
        before the zstd stage. Raises FrameError where decoding would.
        """
        del frame
        return {}

    def pack_residual(self, flat: Flat, residual: FloatArray, space: Scratch, draws: Draws | None) -> Packed:
        """Encodes residual + values and leaves in `residual` what was not sent.

        Any codec: the sum is encoded, decoded and subtracted. Codecs with a fused kernel override it.
        """
        total = space.array("feedback.sum", flat.values.size, flat.values.dtype)
        np.multiply(residual, residual.dtype.type(self.error_scale), out=total)
        total += flat.values
        packed = self.pack(Flat(total, flat.dtype, flat.shape), space, draws)
        payload = bytes(packed.payload)
        frame = Frame(self.id, flat.dtype, flat.shape, packed.scales, packed.flags, payload)
        sent = space.array("feedback.sent", flat.values.size, flat.values.dtype)
        self.unpack(frame, sent, False, space)
        np.subtract(total, sent, out=residual)
        return Packed(payload, packed.scales, packed.flags)

    # ---- shared machinery

    def draws(self, seed: int, name: str, step: int) -> Draws | None:
        """The random numbers for one tensor at one step, or None for a codec that draws none."""
        del seed, name, step
        return None

    def encode_flat(self, flat: Flat, name: str, residual: FloatArray | None, draws: Draws | None) -> Encoded:
        """Encodes into a frame; with a residual, updates it."""
        with scratch() as space:
            try:
                if flat.values.size == 0:
                    packed = Packed(b"")
                elif residual is None:
                    packed = self.pack(flat, space, draws)
                else:
                    packed = self.pack_residual(flat, residual, space, draws)
            except NonFiniteError as error:
                return self.refused(error, name, flat.dtype, flat.shape)
            return self.framed(packed, flat.dtype, flat.shape)

    def framed(self, packed: Packed, dtype: str, shape: tuple[int, ...]) -> Encoded:
        """What was packed, through the zstd stage where there is one, in a frame."""
        flags = packed.flags
        payload: bytes | memoryview
        payload = packed.payload.data if isinstance(packed.payload, np.ndarray) else packed.payload
        if self.entropy and (shrunk := entropy_stage.compress(payload)) is not None:
            flags, payload = flags | _ZSTD, shrunk
        return Encoded(frames.write(self.id, dtype, shape, packed.scales, flags, payload), len(payload))

    def refused(self, error: NonFiniteError, name: str, dtype: str, shape: tuple[int, ...]) -> Encoded:
        """What becomes of a tensor with NaN or Inf: a frame that says so, or the error, with the tensor's name."""
        if self.nonfinite == "skip":
            return Encoded(frames.pack(Frame(self.id, dtype, shape, flags=_NON_FINITE)), 0)
        raise NonFiniteError(f"{name}: {error}") from None


def check_payload(codec: type[Codec], frame: Frame) -> Frame:
    """Undoes the zstd stage and checks the payload's length against the shape, before the shape is allocated.

    Raises:
        FrameError: the payload cannot hold a tensor of this shape, or the sender refused its tensor.
    """
    flags = frame.flags
    if flags:
        if flags & _NON_FINITE:
            raise FrameError("the sender's tensor held NaN or Inf; this frame only says so (frame.non_finite)")
        unknown = flags & OPTION_MASK & ~codec.option_flags
        if unknown:
            raise FrameError(f"{frame.codec}: flags {unknown:#06x} mean nothing to this codec")
    if frame.size == 0:
        if frame.payload or frame.zstd or frame.scales:
            raise FrameError(f"shape {frame.shape} is empty and the payload is not")
        return frame
    most = codec.max_payload_nbytes(frame)
    if flags & _ZSTD:
        raw = entropy_stage.decompress(frame.payload, most)
        frame = Frame(frame.codec, frame.dtype, frame.shape, frame.scales, flags & ~_ZSTD, raw)
    least = codec.min_payload_nbytes(frame)
    if not least <= len(frame.payload) <= most:
        raise FrameError(
            f"{frame.codec}: shape {frame.shape} takes {least} … {most} payload bytes, {len(frame.payload)} came"
        )
    return frame
