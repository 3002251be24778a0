"""What a scheme offers that has kernels for tensors on a GPU: `DeviceCoder`, and the tensors it is given.

`device.py` calls it, `triton_coders.py` implements it, and neither is known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from thinwire.codecs.scheme import Encoded, Payload, Scheme, Step
from thinwire.codecs.scratch import ScratchPool
from thinwire.codecs.tensors import DeviceFlat
from thinwire.errors import NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.contract import require_finite_magnitude

_Scheme = TypeVar("_Scheme", bound=Scheme)


class Framing(Protocol):
    """What a codec is to a batch of its tensors."""

    @property
    def scheme(self) -> Scheme: ...
    @property
    def error_scale(self) -> float: ...
    @property
    def nonfinite(self) -> str: ...
    @property
    def pool(self) -> ScratchPool: ...
    def framed(self, made: Payload | NonFiniteError, flat: DeviceFlat, name: str) -> Encoded:
        """Returns the frame of what a scheme made of a tensor, or of the reason why there is none."""


class Entry(NamedTuple):
    """One tensor to encode.

    Args:
        codec: how.
        flat: its values, on the device.
        residual: on the device, flat; None without error feedback.
        step: what this call adds to the codec's options (the residual aside).
        name: of the tensor, for errors.
    """

    codec: Framing
    flat: DeviceFlat
    residual: torch.Tensor | None
    step: Step
    name: str

    @property
    def alike(self) -> tuple[object, ...]:
        """What tensors of one batch have in common."""
        codec, values, kept = self.codec, self.flat.values, self.residual is not None
        return codec.scheme, self.step.sparsity, codec.error_scale, codec.nonfinite, kept, values.device, values.dtype


class Pending(Protocol):
    """A batch whose kernels are queued."""

    def finish(self) -> Sequence[Any]:
        """Waits for what each tensor became. Call once."""


class DeviceCoder(ABC, Generic[_Scheme]):
    """One scheme's kernels on a device. All tensors given are flat, on that device, of one type."""

    def encodes(self, scheme: _Scheme) -> bool:
        """Whether there are kernels for these options."""
        del scheme
        return True

    def decodes(self, frame: Frame) -> bool:
        """Whether there are kernels for this frame."""
        del frame
        return True

    @abstractmethod
    def start(self, scheme: _Scheme, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        """Queues the encoding of non-empty tensors that are alike.

        Args:
            scheme: how.
            entries: the tensors.
            values: theirs.
            **given: what every kernel takes beside the values: `residuals`, `residual_scale`, `together`, and a
                `workspace` that is theirs until they end.
        """

    def payload(self, scheme: _Scheme, entry: Entry, sent: Any) -> Payload:
        """Returns what one tensor of a finished batch became.

        Raises:
            NonFiniteError: NaN or Inf in the tensor.
        """
        del entry
        require_finite_magnitude(sent.largest)
        return Payload(sent.payload, (sent.scale,), scheme.flags)

    @abstractmethod
    def decode(self, frames: Sequence[Frame], *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        """Fills tensors, or adds into them. Raises FrameError before any of them is touched.

        Args:
            frames: checked, alike but for their shapes and scales.
            outs: flat, of one type.
            **into: what every kernel takes beside them: `accumulate`, and a `workspace`.
        """
