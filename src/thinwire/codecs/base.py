"""Codec and Context: tensor ↔ frame.

A codec is a scheme (`scheme.py`) with error feedback, the zstd stage (`entropy_stage.py`) and a rule for NaN and Inf
around it. A `Context` keeps the state of one tensor between steps: the residual and the place in its random numbers.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Unpack

import msgspec
import torch

from thinwire.cautions import caution
from thinwire.codecs import device
from thinwire.codecs.device_coder import Entry
from thinwire.codecs.lag import check_lag, follow_tensors
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
    off_host,
    refuse_meta,
)
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.frames import Frame
from thinwire.states import Count, read

_NOTHING_ADDED = Step()


class Codec(CodecOptions):
    """Turns tensors into frames.

    Args:
        scheme: how values become a payload; its fields are the options of one codec id.
        entropy: `"zstd"` adds a second stage over the payload, kept where it shrinks; None does not.
        error_feedback: whether a context keeps the unsent values and adds them to the next tensor;
            None takes the scheme's default.
        error_scale: the residual is multiplied by it before it is added (1: keep all; 0.1: ECQ-SGD's, 3LC §5).
        nonfinite: `"raise"` refuses NaN and Inf with NonFiniteError; `"skip"` sends a frame that is flagged as not
            finite, for training loops whose loss scaler then makes every worker skip the step.
        pool: lends scratch memory; codecs made by `tw.codec` share one.

    Example:
        >>> import thinwire as tw
        >>> codec = tw.codec("3lc", sparsity=1.75)
        >>> frame = codec.encode(torch.tensor([1.0, 0.0, -1.0, 0.25]))
        >>> tw.decode(frame)
        tensor([ 1.7500,  0.0000, -1.7500,  0.0000])
        >>> tw.codec(**codec.config()) == codec
        True
    """

    def encode(
        self, tensor: Tensor, *, key: Key | None = None, name: str = "the tensor", **options: Unpack[StepOptions]
    ) -> bytes:
        """Returns one self-describing frame. Keeps nothing: for a residual, use a context.

        Args:
            tensor: any shape; float16, bfloat16, float32 or float64; on the host or on a GPU. Only read.
            key: of the random numbers; by default always the same. See `key`.
            name: used in error messages.
            **options: of this tensor at this step; see `StepOptions`.

        Raises:
            NonFiniteError: NaN or Inf in the tensor (unless `nonfinite="skip"`), or a scale that overflows.
            TypeError: not a floating-point tensor.
            ConfigError: step options that this codec does not take.
        """
        step = Step(key=key or self.key(0, "", 0), **self._checked(options))
        if device.encodes(tensor, self.scheme, name):
            entry = Entry(self, flatten_on_device(tensor, name), None, step, name)
            return device.Batch([entry]).finish()[0].frame
        return self.encode_flat(flatten(tensor, name), step, name).frame

    def context(self, tensor: Tensor, *, name: str = "the tensor", seed: int = 0) -> Context:
        """Returns the state for one tensor in one direction, with a zero residual of the tensor's shape.

        Args:
            tensor: an example; only its shape, dtype and device matter. On a GPU, the residual lives there.
            name: used in error messages, and as part of the key of the tensor's random numbers.
            seed: of the random numbers; workers that average their results must have different ones.
        """
        like = flatten_on_device(tensor) if device.encodes(tensor, self.scheme) else flatten(tensor)
        return Context(self, like, name=name, seed=seed)

    def key(self, seed: int, name: str, step: int) -> Key:
        """Returns the key of one tensor's random numbers at one step; a constant for a codec that draws none."""
        return random_key(seed, name, step) if self.scheme.random else (0, 0)

    def local_scale(self, tensor: Tensor) -> float:
        """Returns the scale that `tensor` needs alone; workers that share scales take the largest of theirs.

        Raises:
            ConfigError: workers share no scale with this codec.
            NonFiniteError: NaN or Inf in the tensor.

        Example:
            >>> import torch, thinwire as tw
            >>> tw.codec("terngrad", clip=0).local_scale(torch.tensor([0.5, -2.0]))
            2.0
        """
        return self.scheme.local_scale(flatten(tensor).values)

    # ---- called by contexts and servers

    def encode_flat(
        self, flat: Flat, step: Step, name: str, out: FloatArray | None = None, *, accumulate: bool = False
    ) -> Encoded:
        """Encodes values in the host's memory into a frame; with a residual in `step`, updates it.

        Args:
            flat: the values.
            step: of this tensor.
            name: used in error messages.
            out: takes the values that a receiver decodes from the frame: flat, as many as the values and of their
                dtype; filled from the payload, without parsing the frame.
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
        """Decodes a payload that was just encoded."""
        if isinstance(made, NonFiniteError):
            raise NonFiniteError(f"{name}: {made}")
        frame = Frame(self.id, flat.dtype, flat.shape, made.scales, made.flags, made.buffer)
        with self.pool.lend() as own:
            self.scheme.decode(frame, out, accumulate, own)

    def _checked(self, options: StepOptions) -> StepOptions:
        """Returns the options of one step. Raises ConfigError for one that the scheme does not take."""
        if not options:
            return options
        if not self.scheme.step_options.issuperset(options):
            allowed = ", ".join(sorted(self.scheme.step_options)) or "none"
            raise ConfigError(f"{self.id}: {', '.join(options)} is not an option of a step; allowed are: {allowed}")
        given: dict[str, Any] = {**options}
        for name, value in given.items():
            whole = name == "workers"
            number = hasattr(value, "__index__" if whole else "__float__") and not isinstance(value, bool)
            if value is not None and not (number and math.isfinite(value) and value >= whole):
                kind = "a whole number of at least 1" if whole else "a finite number of at least 0"
                raise ConfigError(f"{self.id}: {name}={value!r}; it must be {kind}")
        return options


class SavedContext(msgspec.Struct, frozen=True):
    """A context's `state_dict` as a record."""

    step: Count
    seed: int
    residual: torch.Tensor | None = None
    lag: dict[str, Any] | None = None


class Context:
    """The state of one tensor between steps: the residual and the number of steps (3LC §3, figure 1).

    For a tensor on a GPU, and a codec with kernels for it, the context keeps the residual and encodes on the GPU
    (`thinwire.codecs.encoding` encodes many tensors at once); otherwise in the host's memory.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec("3lc", sparsity=1.0)
        >>> context = codec.context(torch.zeros(3))
        >>> sent = tw.decode(context.encode(torch.tensor([1.0, 0.25, -0.125])))
        >>> sent + context.residual
        tensor([ 1.0000,  0.2500, -0.1250])
    """

    def __init__(self, codec: Codec, like: Flat | DeviceFlat, *, name: str, seed: int) -> None:
        self.codec = codec
        self.name = name
        self.seed = _integer(f"{name}: seed", seed)
        self.step = 0
        self.payload_nbytes = 0
        """Payload size of the last encoded frame, in bytes."""
        self.lag_bound = codec.scheme.lag_bound() if codec.residual_by_default else None
        """Chooses the sparsity multiplier; None where the codec's options fix it."""
        values = like.values if isinstance(like, DeviceFlat) else torch.from_numpy(like.values)
        self.device = values.device
        """Where the residual is, and where tensors are encoded."""
        self.on_host = isinstance(like, Flat)
        self.dtype = like.dtype
        self.size = math.prod(like.shape)
        self._wide = values.dtype
        self.shape = like.shape
        self._residual: torch.Tensor | None = None
        if codec.residual_by_default:
            with torch.inference_mode(False):  # an inference tensor cannot be written outside of that mode
                self._residual = torch.zeros(self.size, dtype=self._wide, device=self.device)

    @property
    def residual(self) -> torch.Tensor | None:
        """The unsent values, in the tensor's shape, float32 (float64 for float64 tensors); a view, not a copy.

        None where the codec runs without error feedback.
        """
        return None if self._residual is None else self._residual.view(self.shape)

    @property
    def residual_address(self) -> int:
        """The residual's address, valid while the context exists; 0 without a residual."""
        return 0 if self._residual is None else self._residual.data_ptr()

    def encode(self, tensor: Tensor, **options: Unpack[StepOptions]) -> bytes:
        """Encodes residual + tensor into a frame; unsent values stay in `residual`.

        Args:
            tensor: of the shape that the context was made for.
            **options: of this tensor at this step; see `StepOptions`.

        Raises:
            NonFiniteError: NaN or Inf; the residual is unchanged, bit for bit.
            ConfigError: another shape or dtype class than the context was made for, or step options that the codec
                does not take.
        """
        if not self.on_host:
            entry = self.entry(tensor, options)
            [encoded] = device.Batch([entry]).finish()
            self.sent(encoded.payload_nbytes)
            follow_tensors([(self.lag_bound, entry.flat.values, entry.residual)])
            return encoded.frame
        if off_host(tensor) and device.why_not_encoded(self.codec.scheme, tensor.device) is None:
            caution(
                f"a context of {self.codec.id} was made for a tensor on the CPU and gets one on {tensor.device.type}: "
                "every encode copies the whole tensor to the host and waits for it. Make contexts from tensors on the "
                "GPU"
            )
        flat = self.flat(tensor)
        residual, scale = None if self._residual is None else self._residual.numpy(), self.codec.error_scale
        step = Step(residual, scale, self._key(), sparsity=self._sparsity, **self.codec._checked(options))
        encoded = self.codec.encode_flat(flat, step, self.name)
        self.sent(encoded.payload_nbytes)
        if self.lag_bound is not None and residual is not None:
            self.lag_bound.follow(flat.values, residual)
        return encoded.frame

    def local_scale(self, tensor: Tensor) -> float:
        """As `Codec.local_scale`, of residual + tensor."""
        if self.residual is None:
            return self.codec.local_scale(tensor)
        values = torch.as_tensor(tensor, device=tensor.device).to(self.residual)
        return self.codec.local_scale(self.codec.error_scale * self.residual + values)

    def flat(self, tensor: Tensor) -> Flat:
        """Returns the tensor's values in the host's memory. Raises ConfigError as `encode`."""
        flat = flatten(tensor, self.name)
        self.check(flat)
        return flat

    def entry(self, tensor: Tensor, options: StepOptions) -> Entry:
        """Returns this tensor's entry for a batch on the context's device. Raises ConfigError as `encode`."""
        if isinstance(tensor, torch.Tensor):
            if tensor.device != self.device:
                refuse_meta(tensor, self.name)
                tensor = tensor.to(self.device)
            flat = flatten_on_device(tensor, self.name)
        else:
            on_host = flatten(tensor, self.name)
            flat = DeviceFlat(torch.from_numpy(on_host.values).to(self.device), on_host.dtype, on_host.shape)
        self.check(flat)
        step = _NOTHING_ADDED
        if options or self.lag_bound is not None or self.codec.random:
            step = Step(key=self._key(), sparsity=self._sparsity, **self.codec._checked(options))
        return Entry(self.codec, flat, self._residual, step, self.name)

    def check(self, flat: Flat | DeviceFlat) -> None:
        """Raises ConfigError for a tensor of another shape or dtype class than the context's."""
        if flat.shape != self.shape:
            raise ConfigError(f"{self.name} has shape {flat.shape}; this context is for {self.shape}")
        if self._residual is not None and (flat.dtype == "fp64") != (self.dtype == "fp64"):
            raise ConfigError(
                f"{self.name} has dtype {flat.dtype}; this context was made for {self.dtype} "
                f"and keeps its residual as {str(self._wide).removeprefix('torch.')}"
            )

    def sent(self, payload_nbytes: int) -> None:
        """Counts an encoded tensor."""
        self.payload_nbytes = payload_nbytes
        self.step += 1

    def _key(self) -> Key:
        return self.codec.key(self.seed, self.name, self.step)

    @property
    def _sparsity(self) -> float | None:
        return None if self.lag_bound is None else self.lag_bound.sparsity

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state, for an exact resume: `step`, `seed` and, if present, `residual` and `lag`."""
        state: dict[str, Any] = {"step": self.step, "seed": self.seed}
        if self.residual is not None:
            state["residual"] = self.residual.clone()
        if self.lag_bound is not None:
            state["lag"] = self.lag_bound.state_dict()
        return state

    def check_state(self, state: object) -> SavedContext:
        """Returns a state from `state_dict` as a record.

        Raises:
            ConfigError: the state is of another shape, of a codec with (or without) error feedback, or damaged.
        """
        saved = read(SavedContext, state, self.name)
        if (saved.residual is None) != (self._residual is None):
            does = "keeps" if self._residual is not None else "does not keep"
            raise ConfigError(f"{self.name}: this context {does} a residual and the state says otherwise")
        kept = saved.residual
        if kept is not None and not (
            tuple(kept.shape) == self.shape and kept.is_floating_point() and kept.to(self._wide).isfinite().all()
        ):
            raise ConfigError(
                f"{self.name}: the state's residual has shape {tuple(kept.shape)} and dtype {kept.dtype}; expected "
                f"finite values of shape {self.shape}"
            )
        if self.lag_bound is not None and saved.lag is not None:
            check_lag(saved.lag)
        return saved

    def load_state_dict(self, state: object) -> None:
        """Restores a state. Raises as `check_state`, before anything changes."""
        saved = self.check_state(state)
        if self.lag_bound is not None and saved.lag is not None:  # a run may resume with a bound that it began without
            self.lag_bound.load_state_dict(saved.lag)
        if saved.residual is not None and self._residual is not None:
            self._residual.copy_(saved.residual.reshape(-1))
        self.step, self.seed = saved.step, saved.seed


def _integer(what: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises TypeError for any other type
    except TypeError:
        raise ConfigError(f"{what} is {value!r}; it must be a whole number") from None
