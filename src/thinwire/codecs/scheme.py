"""The interface of a scheme: how one codec id turns values into a payload and back.

A scheme is a frozen dataclass; its fields are the options of its id, and their annotations give the allowed values. It
has no state and knows no tensors, frames' bytes, residuals' memory or second stages: a `Codec` (`base.py`) adds those.
A new scheme implements `encode` and `decode` on flat arrays, and registers.

Decoding needs only the frame, so `decode` and the sizes are class methods.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from thinwire import frames
from thinwire.cautions import caution
from thinwire.codecs.lag import DeltaLagBound, LagBound
from thinwire.codecs.options import Between, check_options
from thinwire.codecs.scratch import Scratch, ScratchPool
from thinwire.codecs.tensors import DeviceFlat, Flat, FloatArray
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.frames import Frame
from thinwire.frames.layout import NON_FINITE, ZSTD
from thinwire.kernels.contract import require_finite_magnitude
from thinwire.kernels.numba.jit import max_magnitude

Key: TypeAlias = tuple[int, int]
"""Two 32-bit words that key all random numbers of one tensor at one step."""
Explained: TypeAlias = dict[str, tuple[Any, str]]
"""The fields of a frame by name: each field's JSON value and its meaning."""


class Payload(NamedTuple):
    """A scheme's encoding of a tensor. `data` may be a view into the scratch memory, valid until its next use."""

    data: bytes | memoryview | NDArray[np.uint8]
    scales: tuple[float, ...] = ()
    flags: int = 0

    @property
    def buffer(self) -> bytes | memoryview:
        """The data as a frame takes it."""
        return self.data.data if isinstance(self.data, np.ndarray) else self.data


class Transform(Protocol):
    """An orthonormal transform of a tensor's values; equal ones are the same transform."""

    def invert(self, values: FloatArray) -> None:
        """Replaces flat coefficients by their values."""


class Sent(NamedTuple):
    """The positions and values in a frame that holds some of a tensor's values. No position occurs twice."""

    positions: NDArray[np.int64]
    values: FloatArray
    transform: Transform | None = None
    """The transform of which `values` are coefficients; None: they are the tensor's own values."""


class StepOptions(TypedDict, total=False):
    """Options of one tensor at one step, for the codecs that take them (`Scheme.step_options`)."""

    scale: float
    """The scale that all workers share (`terngrad`, `votes`)."""
    workers: int
    """How many workers' trits were added (`votes`)."""
    rms: float
    """Root mean square of the loss's derivative by the values (`entropy` with `mode="rms"`)."""


class Encoded(NamedTuple):
    """A frame, and its payload's size in bytes, which the papers count."""

    frame: bytes
    payload_nbytes: int


class Step(NamedTuple):
    """The arguments of one call, beside the options of a scheme."""

    residual: FloatArray | None = None
    """Is added to the values and takes the unsent ones; None unless the scheme's `fuses_residual` is true."""
    residual_scale: float = 1.0
    """The residual is multiplied by it before it is added."""
    key: Key = (0, 0)
    """Key of the random numbers."""
    scale: float | None = None
    workers: int | None = None
    rms: float | None = None
    sparsity: float | None = None
    """The multiplier that a bound on the lag chose; None: the one in the options."""


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """Encodes and decodes the tensors of one codec id."""

    id: ClassVar[str]
    keeps_residual: ClassVar[bool] = False
    """Whether contexts keep a residual by default."""
    random: ClassVar[bool] = False
    """Whether `encode` draws random numbers."""
    unbiased: ClassVar[bool] = False
    """Whether the mean over those numbers is the tensor itself; a residual then causes a warning."""
    option_flags: ClassVar[int] = 0
    """The high-byte flags (`Flags.OPTION_A` …) that its frames may carry."""
    num_scales: ClassVar[int | None] = None
    """The number of scales in a frame of values, none negative; None: `decode` checks them."""
    sends_some: ClassVar[bool] = False
    """Whether a frame holds only some of the values, which `sent` returns."""
    checks_finite: ClassVar[bool] = False
    """Whether `encode` refuses NaN and Inf; otherwise values and residual are checked before the call."""
    fuses: ClassVar[bool] = False
    """The default of `fuses_residual`, for every shape."""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def flags(self) -> int:
        """The option flags of its frames that the options determine."""
        return 0

    @property
    def step_options(self) -> frozenset[str]:
        """The names of the `StepOptions` that it takes with its present options."""
        return frozenset()

    def fuses_residual(self, shape: tuple[int, ...]) -> bool:
        """Whether `encode` adds `step.residual` and leaves the unsent values there, without further passes.

        For other schemes and shapes `encode_with_residual` encodes the sum, decodes it and subtracts.
        """
        del shape
        return self.fuses

    def lag_bound(self) -> LagBound | None:
        """Returns a bound that chooses the multipliers of one residual; None where the options fix the multiplier."""
        return None

    def delta_lag_bound(self) -> DeltaLagBound | None:
        """As `lag_bound`, for a copy of a model."""
        return None

    def why_no_residual(self) -> str | None:
        """Returns why a residual cannot work with these options; None where it can."""
        return None

    def local_scale(self, values: FloatArray) -> float:
        """Returns the scale that these values need alone. Raises ConfigError where workers share none."""
        del values
        raise ConfigError(f"{self.id}: workers share no scale")

    @abstractmethod
    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        """Encodes one or more values. Raises NonFiniteError before anything is changed."""

    @classmethod
    @abstractmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        """Fills (or adds into) flat `out` of `frame.size` values. Raises FrameError before `out` is touched."""

    @classmethod
    def sent(cls, frame: Frame, space: Scratch) -> Sent:
        """Returns the positions and values in a checked, non-empty frame, in new arrays.

        Only for schemes with `sends_some`. Raises FrameError where decoding would.
        """
        raise NotImplementedError(f"{cls.id} sends all values")

    @classmethod
    @abstractmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        """Returns the most bytes that a payload of this shape can have before the zstd stage."""

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        """Returns the fewest bytes that a payload of this shape can have before the zstd stage; by default the most.

        A shorter frame is refused before memory of the shape's size is allocated.
        """
        return cls.max_payload_nbytes(frame)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        """Explains the scheme's fields of a checked, non-empty frame: scales, option flags, payload.

        `thinwire inspect FRAME` prints them; without this method it prints the header alone. The payload is the one
        before the zstd stage. Raises FrameError where decoding would.
        """
        del frame, space
        return {}


@dataclass(frozen=True)
class CodecOptions:
    """A scheme and the options of every codec; `Codec` (`base.py`) documents them."""

    scheme: Scheme
    entropy: Literal["zstd"] | None = field(default=None, kw_only=True)
    error_feedback: bool | None = field(default=None, kw_only=True)
    error_scale: Annotated[float, Between(0, 1)] = field(default=1.0, kw_only=True)
    nonfinite: Literal["raise", "skip"] = field(default="raise", kw_only=True)
    pool: ScratchPool = field(default_factory=ScratchPool, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        check_options(self)
        if self.error_feedback:
            if reason := self.scheme.why_no_residual():
                raise ConfigError(f"{self.id}: error_feedback=True: {reason}")
            if self.scheme.unbiased:
                caution(
                    f"{self.id} is unbiased: with error feedback its rounding noise, which would average out, is kept "
                    "and sent again (3LC §3.1 reports that stochastic 3-value quantisation then failed to converge)"
                )

    @property
    def id(self) -> str:
        """The codec's id, one of `tw.codecs()`."""
        return self.scheme.id

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return self.scheme.random

    @property
    def residual_by_default(self) -> bool:
        """Whether this codec's contexts keep a residual."""
        return self.scheme.keeps_residual if self.error_feedback is None else self.error_feedback

    def config(self) -> dict[str, Any]:
        """Returns the codec as JSON values, with its id; `tw.codec(**config)` is an equal codec."""
        own = {name: getattr(self, name) for name in WRAPPER_OPTIONS}
        return {"id": self.id, **own, **{each.name: getattr(self.scheme, each.name) for each in fields(self.scheme)}}

    def framed(self, made: Payload | NonFiniteError, flat: Flat | DeviceFlat, name: str) -> Encoded:
        """Returns the frame of a payload, after the zstd stage if the codec has one.

        Args:
            made: the payload, whose data must be valid during the call, or the error in its place.
            flat: the tensor.
            name: of the tensor, for the error.

        Raises:
            NonFiniteError: `made` is an error, and the codec does not skip.
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

    def __repr__(self) -> str:
        """Returns the call that makes the codec, as in `tw.codec('3lc', sparsity=1.75)`."""
        return f"tw.codec({', '.join([repr(self.id), *(f'{name}={value!r}' for name, value in self._changed())])})"

    def __str__(self) -> str:
        """Returns the codec's name in a design, as in `3lc[sparsity=1.75]`."""
        changed = ",".join(f"{name}={value}" for name, value in self._changed())
        return f"{self.id}[{changed}]" if changed else self.id

    def _changed(self) -> list[tuple[str, Any]]:
        """Returns the options that differ from their defaults, in the order of `config()`."""
        defaults = {each.name: each.default for owner in (self, self.scheme) for each in fields(owner)}
        return [(name, value) for name, value in self.config().items() if name != "id" and value != defaults[name]]


WRAPPER_OPTIONS = ("entropy", "error_feedback", "error_scale", "nonfinite")
"""The options of every codec, in the order of `config()`."""


def encode_with_residual(scheme: Scheme, flat: Flat, step: Step, space: Scratch) -> Payload:
    """Encodes with error feedback (3LC §3, 1-bit SGD): unsent values are added to the next tensor.

        v = scale·residual + values        sent = decode(encode(v))        residual = v − sent

    Schemes whose kernels fuse the residual need no further pass; all others need three.
    Raises NonFiniteError before anything is changed.
    """
    residual = step.residual
    if not scheme.checks_finite:
        finite_magnitude(flat, step)
    if residual is None or scheme.fuses_residual(flat.shape):
        return _as_sent(scheme, scheme.encode(flat, step, space), flat)
    size, dtype = flat.values.size, flat.values.dtype
    total = space.array("feedback.sum", size, dtype)
    np.multiply(residual, dtype.type(step.residual_scale), out=total)
    total += flat.values
    coded = Flat(total, flat.dtype, flat.shape)
    payload = _as_sent(scheme, scheme.encode(coded, step._replace(residual=None), space), coded)
    data = bytes(payload.data)  # a copy, because decoding may overwrite its memory
    sent = space.array("feedback.sent", size, dtype)
    scheme.decode(Frame(scheme.id, flat.dtype, flat.shape, payload.scales, payload.flags, data), sent, False, space)
    np.subtract(total, sent, out=residual)
    return Payload(data, payload.scales, payload.flags)


def _as_sent(scheme: Scheme, payload: Payload, flat: Flat) -> Payload:
    """Returns a payload with scales rounded as in the frame, so that the sender decodes the same values as receivers.

    Raises TypeError where a scheme returned something else than a payload, and NonFiniteError where a rounded scale is
    not finite: no receiver could decode it.
    """
    if not isinstance(payload, Payload):
        raise TypeError(f"{scheme.id}: encode returned a {type(payload).__name__}; a Payload is expected")
    if isinstance(payload.data, np.ndarray) and payload.data.dtype != np.uint8:
        raise TypeError(f"{scheme.id}: encode returned an array of {payload.data.dtype}; uint8 is expected")
    if scheme.num_scales is not None and len(payload.scales) != scheme.num_scales:
        raise TypeError(
            f"{scheme.id}: encode returned {len(payload.scales)} scales; num_scales says {scheme.num_scales}"
        )
    if not payload.scales:
        return payload
    kind, most = flat.values.dtype.type, float(np.finfo(flat.values.dtype).max)
    if not all(abs(scale) <= most for scale in payload.scales):
        raise NonFiniteError(
            f"{scheme.id}: a scale of {max(payload.scales, key=abs):g} is more than {flat.values.dtype} holds: "
            "the values are too large for this codec"
        )
    return payload._replace(scales=tuple(float(kind(scale)) for scale in payload.scales))


def finite_magnitude(flat: Flat, step: Step | None = None) -> float:
    """Returns the largest |v| of the values and of the step's residual. Raises NonFiniteError for NaN or Inf."""
    residual, factor = (None, 1.0) if step is None else (step.residual, step.residual_scale)
    largest = max_magnitude(flat.values, residual, factor)
    require_finite_magnitude(largest)
    return largest


def stream_seed(seed: int, rank: int | None) -> int:
    """Returns the seed of one worker's random numbers, or of the shards'.

    All seeds must differ: a shard that rounds a mean with the same numbers as one worker counts that worker's rounding
    error twice.

    Args:
        seed: of the training.
        rank: the worker's, below 65,536; None: the shards'.

    Example:
        >>> stream_seed(0, 0), stream_seed(0, 4), stream_seed(0, None), stream_seed(1, 0)
        (0, 4, 65536, 65537)
    """
    return seed * 65_537 + (65_536 if rank is None else rank)


def random_key(seed: int, name: str, step: int) -> Key:
    """Returns the key of one tensor's random numbers at one step, for the kernels' counter-based generator.

    It is the first number of a Philox generator that is keyed with a hash of all three. Numbers are keyed, not
    continued, so results depend neither on the order of layers nor on threads, and a resumed run draws the same
    numbers.

    Example:
        >>> random_key(1, "conv1.weight", 0) == random_key(1, "conv1.weight", 0) != random_key(1, "conv1.weight", 1)
        True
    """
    digest = hashlib.blake2b(f"{seed}\0{step}\0{name}".encode(), digest_size=16).digest()
    word = int(np.random.Philox(key=int.from_bytes(digest, "little")).random_raw())
    return word & 0xFFFFFFFF, word >> 32
