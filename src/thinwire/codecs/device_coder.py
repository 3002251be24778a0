"""`DeviceCoder`: the interface of a scheme with kernels for tensors on a GPU, and the tensors that it encodes.

`device.py` calls it and `triton_coders.py` implements it; this file imports neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from thinwire.codecs.scheme import CodecOptions, Payload, Step
from thinwire.codecs.tensors import DeviceFlat
from thinwire.frames import Frame
from thinwire.kernels.contract import require_finite_magnitude


class Entry(NamedTuple):
    """One tensor to encode.

    Args:
        codec: of the tensor.
        flat: its values, on the device.
        residual: on the device, flat; None without error feedback.
        step: this call's additions to the codec's options, without the residual.
        name: of the tensor, for errors.
    """

    codec: CodecOptions
    flat: DeviceFlat
    residual: torch.Tensor | None
    step: Step
    name: str

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Tensors with equal keys may share a batch."""
        codec, values, kept = self.codec, self.flat.values, self.residual is not None
        return codec.scheme, self.step.sparsity, codec.error_scale, codec.nonfinite, kept, values.device, values.dtype


class DeviceCoder(ABC):
    """One scheme's kernels on a device. All tensors are flat, on that device, of one type."""

    def encodes(self, scheme: Any) -> bool:
        """Whether there are kernels for these options."""
        del scheme
        return True

    def decodes(self, frame: Frame) -> bool:
        """Whether there are kernels for this frame."""
        del frame
        return True

    @abstractmethod
    def start(self, scheme: Any, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Any:
        """Queues the encoding of non-empty tensors with equal keys; the result's `finish()` waits for them.

        Args:
            scheme: of all entries.
            entries: the tensors.
            values: the tensors' values.
            **given: arguments of every kernel: `residuals`, `residual_scale`, `together`, and a `workspace` that is in
                use until the kernels end.
        """

    def payload(self, scheme: Any, entry: Entry, sent: Any) -> Payload:
        """Returns the payload of one tensor of a finished batch.

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
            frames: checked, equal except for their shapes and scales.
            outs: flat, of one type.
            **into: arguments of every kernel: `accumulate` and a `workspace`.
        """
