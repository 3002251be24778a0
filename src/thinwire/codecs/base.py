"""Codec: tensor ↔ frame.

A codec is a scheme (`scheme.py`) with three things around it that any scheme takes: error feedback, the zstd stage
(`entropy_stage.py`), and what becomes of NaN and Inf. It is a frozen value: `config()` is all of it as JSON and
`tw.codec(**config)` an equal codec. What one tensor needs between steps (the residual, how far its random numbers have
come) lives in a `Context` (`contexts.py`).

Tensors on a GPU are encoded there where their scheme has kernels (`device.py`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Unpack

import torch

from thinwire import frames
from thinwire.codecs import device
from thinwire.codecs.contexts import Context
from thinwire.codecs.scheme import (
    CodecOptions,
    Encoded,
    Key,
    Payload,
    Step,
    StepOptions,
    encode_with_residual,
    random_key,
)
from thinwire.codecs.tensors import (
    DeviceFlat,
    Flat,
    FloatArray,
    Tensor,
    flatten,
    flatten_on_device,
)
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.frames import Frame
from thinwire.frames.layout import NON_FINITE, ZSTD


class Codec(CodecOptions):
    """Turns tensors into frames.

    Args:
        scheme: how values become a payload; its fields are the options of one codec id.
        entropy: `"zstd"` adds a second stage over the payload, kept where it shrinks; None does not.
        error_feedback: whether a context keeps what was not sent and adds it to the next tensor;
            None means the scheme's own default.
        error_scale: the residual is multiplied by it before it is added (1: keep all; 0.1: ECQ-SGD's, 3LC §5).
        nonfinite: `"raise"` refuses NaN and Inf with NonFiniteError; `"skip"` sends a frame that says so,
            for training loops whose loss scaler then makes every worker skip the step.
        pool: lends the memory to work in; codecs made by `tw.codec` share one.
    """

    def encode(
        self, tensor: Tensor, *, key: Key | None = None, name: str = "the tensor", **options: Unpack[StepOptions]
    ) -> bytes:
        """Returns one self-describing frame. Keeps nothing: for a residual, use a context.

        Args:
            tensor: any shape; float16, bfloat16, float32 or float64; on the host or on a GPU. Only read.
            key: of the random numbers; by default always the same. See `key`.
            name: used in error messages.
            **options: what is known of this tensor at this step; see `StepOptions`.

        Raises:
            NonFiniteError: NaN or Inf in the tensor (unless `nonfinite="skip"`), or a scale that overflows.
            TypeError: not a floating-point tensor.
            ConfigError: step options that this codec does not take.
        """
        step = Step(key=key or self.key(0, "", 0), **self.checked(options))
        if device.encodes(tensor, self.scheme):
            entry = self.entry(flatten_on_device(tensor, name), None, step, name)
            return device.Batch([entry], self.pool).finish()[0].frame
        return self.encode_flat(flatten(tensor, name), step, name).frame

    def context(self, tensor: Tensor, *, name: str = "the tensor", seed: int = 0) -> Context:
        """Returns the state for one tensor in one direction, with a zero residual of the tensor's shape.

        Args:
            tensor: an example; only its shape, dtype and device matter. On a GPU, the residual lives there.
            name: used in error messages, and to give every tensor random numbers of its own.
            seed: of the random numbers; workers that average their results must have different ones.
        """
        like = flatten_on_device(tensor) if device.encodes(tensor, self.scheme) else flatten(tensor)
        return Context(self, like, name=name, seed=seed)

    def key(self, seed: int, name: str, step: int) -> Key:
        """Returns the key of one tensor's random numbers at one step; always the same for a codec that draws none."""
        return random_key(seed, name, step) if self.scheme.random else (0, 0)

    def local_scale(self, tensor: Tensor) -> float:
        """Returns the scale that `tensor` asks for by itself: workers that share scales take the largest of theirs.

        Raises:
            ConfigError: a codec whose workers share no scale.
            NonFiniteError: NaN or Inf in the tensor.

        Example:
            >>> import torch, thinwire as tw
            >>> tw.codec("terngrad", clip=0).local_scale(torch.tensor([0.5, -2.0]))
            2.0
        """
        if device.encodes(tensor, self.scheme) and tensor.numel():
            return device.local_scale(self.scheme, flatten_on_device(tensor).values, self.pool)
        return self.scheme.local_scale(flatten(tensor).values)

    # ---- what contexts and servers call

    def encode_flat(
        self, flat: Flat, step: Step, name: str, out: FloatArray | None = None, *, accumulate: bool = False
    ) -> Encoded:
        """Encodes values in the host's memory into a frame; with a residual in `step`, updates it.

        Args:
            flat: the values.
            step: what is known of this tensor at this step.
            name: used in error messages.
            out: for a sender that also needs what a receiver decodes from the frame: float32 or float64 as the values,
                flat, as many; filled from the payload, without another look at the frame.
            accumulate: adds into `out` instead of overwriting it.

        Raises:
            NonFiniteError: NaN or Inf in the tensor, unless the codec skips; with `out` always.
        """
        made: Payload | NonFiniteError = Payload(b"")
        with self.pool.lend() as space:
            if flat.values.size:
                try:
                    made = encode_with_residual(self.scheme, flat, step, space)
                except NonFiniteError as error:
                    made = error
                if out is not None:
                    self._decode(made, flat, name, out, accumulate)
            return self.framed(made, flat, name)

    def _decode(self, made: Payload | NonFiniteError, flat: Flat, name: str, out: FloatArray, accumulate: bool) -> None:
        """Decodes what was just encoded."""
        if isinstance(made, NonFiniteError):
            raise NonFiniteError(f"{name}: {made}")
        frame = Frame(self.id, flat.dtype, flat.shape, made.scales, made.flags, made.buffer)
        with self.pool.lend() as own:
            self.scheme.decode(frame, out, accumulate, own)

    def entry(self, flat: DeviceFlat, residual: torch.Tensor | None, step: Step, name: str) -> device.Entry:
        """Returns what a batch on the tensor's device needs of it."""
        framed = partial(self.framed, flat=flat, name=name)
        return device.Entry(self.scheme, flat, residual, self.error_scale, self.nonfinite == "raise", step, framed)

    def framed(self, made: Payload | NonFiniteError, flat: Flat | DeviceFlat, name: str) -> Encoded:
        """Returns the frame of what a scheme made of a tensor, through the zstd stage where there is one.

        Args:
            made: a payload, or the reason why there is none.
            flat: the tensor.
            name: of the tensor, for the error.

        Raises:
            NonFiniteError: there is no payload, and the codec does not skip.
        """
        if isinstance(made, NonFiniteError):
            if self.nonfinite == "skip":
                return Encoded(frames.pack(Frame(self.id, flat.dtype, flat.shape, flags=NON_FINITE)), 0)
            raise NonFiniteError(f"{name}: {made}") from None
        flags, data = made.flags, made.buffer
        if self.entropy:
            with self.pool.lend() as space:
                shrunk = space.entropy_stage.compress(data)
            if shrunk is not None:
                flags, data = flags | ZSTD, shrunk
        return Encoded(frames.write(self.id, flat.dtype, flat.shape, made.scales, flags, data), len(data))

    def checked(self, options: StepOptions) -> StepOptions:
        """Returns the options of one step. Raises ConfigError for one that the scheme does not take."""
        if options and not self.scheme.step_options.issuperset(options):
            allowed = ", ".join(sorted(self.scheme.step_options)) or "none"
            raise ConfigError(f"{self.id}: {', '.join(options)} cannot be said of a step; allowed are: {allowed}")
        given: dict[str, Any] = {**options}
        for name, value in given.items():
            whole = name == "workers"
            number = hasattr(value, "__index__" if whole else "__float__") and not isinstance(value, bool)
            if value is not None and not (number and math.isfinite(value) and value >= whole):
                kind = "a whole number of at least 1" if whole else "a finite number of at least 0"
                raise ConfigError(f"{self.id}: {name}={value!r}; it must be {kind}")
        return options
