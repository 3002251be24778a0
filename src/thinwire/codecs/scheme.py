"""The contract of a scheme: how one codec id turns values into a payload and back.

A scheme is a frozen dataclass; its fields are the options of its id, and their annotations say what is allowed. It has
no state and knows no tensors, frames' bytes, residuals' memory or second stages: a `Codec` (`base.py`) puts those
around it. A new scheme writes `encode` and `decode` on flat arrays, and registers.

Decoding needs nothing but the frame, so `decode` and the sizes are class methods.
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
"""Two words of 32 bits, from which all random numbers of one tensor at one step come."""
Explained: TypeAlias = dict[str, tuple[Any, str]]
"""The fields of a frame by name: what each holds, as a JSON value, and what that means."""


class Payload(NamedTuple):
    """What a scheme makes of a tensor. `data` may be a view into the scratch, valid until its next use."""

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
        """Replaces flat coefficients by the values that they stand for."""


class Sent(NamedTuple):
    """What a frame holds of a tensor of which some values travel: where, and which. No position comes twice."""

    positions: NDArray[np.int64]
    values: FloatArray
    transform: Transform | None = None
    """What they are coefficients of; None: they are the tensor's own values."""


class StepOptions(TypedDict, total=False):
    """What may be said of one tensor at one step, to the codecs that take it (`Scheme.step_options`)."""

    scale: float
    """The scale that all workers share (`terngrad`, `votes`)."""
    workers: int
    """How many workers' trits were added (`votes`)."""
    rms: float
    """Root mean square of the loss's derivative by the values (`entropy` with `mode="rms"`)."""


class Encoded(NamedTuple):
    """A frame, and how many of its bytes are the payload: what the papers count."""

    frame: bytes
    payload_nbytes: int


class Step(NamedTuple):
    """What one call adds to the options of a scheme."""

    residual: FloatArray | None = None
    """Is added to the values, and takes what is not sent; None unless the scheme says `fuses_residual`."""
    residual_scale: float = 1.0
    """The residual is multiplied by it before."""
    key: Key = (0, 0)
    """Of the random numbers."""
    scale: float | None = None
    workers: int | None = None
    rms: float | None = None
    sparsity: float | None = None
    """The multiplier that a bound on the lag has found; None: the one of the options."""


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """How the tensors of one codec id are encoded."""

    id: ClassVar[str]
    keeps_residual: ClassVar[bool] = False
    """Whether contexts keep a residual unless told otherwise."""
    random: ClassVar[bool] = False
    """Whether `encode` draws random numbers."""
    unbiased: ClassVar[bool] = False
    """Whether the mean over those numbers is the tensor itself; a residual is then warned about."""
    option_flags: ClassVar[int] = 0
    """The high-byte flags (`Flags.OPTION_A` …) that its frames may carry."""
    num_scales: ClassVar[int | None] = None
    """How many scales a frame of values has, none of them negative; None: `decode` checks them."""
    sends_some: ClassVar[bool] = False
    """Whether a frame holds only some of the values, and `sent` says which."""
    checks_finite: ClassVar[bool] = False
    """Whether `encode` itself refuses NaN and Inf; for one that does not, values and residual are looked at before."""
    fuses: ClassVar[bool] = False
    """What `fuses_residual` says of every shape."""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def flags(self) -> int:
        """The option flags of its frames that follow from the options alone."""
        return 0

    @property
    def step_options(self) -> frozenset[str]:
        """Which of `StepOptions` it takes, as it is configured."""
        return frozenset()

    def fuses_residual(self, shape: tuple[int, ...]) -> bool:
        """Whether `encode` adds `step.residual` and leaves there what was not sent, in the passes that it makes anyway.

        For other schemes and shapes `encode_with_residual` encodes the sum, decodes it and subtracts.
        """
        del shape
        return self.fuses

    def lag_bound(self) -> LagBound | None:
        """Returns what chooses the multiplier of one residual's steps; None where the options alone say it."""
        return None

    def delta_lag_bound(self) -> DeltaLagBound | None:
        """As `lag_bound`, of a copy of a model."""
        return None

    def why_no_residual(self) -> str | None:
        """Says why a residual cannot work with these options; None where it can."""
        return None

    def local_scale(self, values: FloatArray) -> float:
        """Returns the scale that these values ask for by themselves. Raises ConfigError where workers share none."""
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
        """Returns which values a checked, non-empty frame holds, in arrays of their own.

        Only of schemes with `sends_some`. Raises FrameError where decoding would.
        """
        raise NotImplementedError(f"{cls.id} sends all values")

    @classmethod
    @abstractmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        """Most bytes a payload of this shape can have before the zstd stage."""

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        """Fewest bytes a payload of this shape can have before the zstd stage: what a short frame may not claim.

        By default the most are the fewest.
        """
        return cls.max_payload_nbytes(frame)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        """Says what the scheme's own fields of a checked, non-empty frame mean: scales, option flags, payload.

        For people (`thinwire inspect FRAME`); a scheme without it is explained by its header alone. The payload is that
        before the zstd stage. Raises FrameError where decoding would.
        """
        del frame, space
        return {}


@dataclass(frozen=True)
class CodecOptions:
    """A scheme and the options of every codec; what they mean, `Codec` (`base.py`) says."""

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
        """Returns the frame of what a scheme made of a tensor, through the zstd stage where there is one.

        Args:
            made: a payload, whose data must be valid during the call, or the reason why there is none.
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

    def __repr__(self) -> str:
        """The call that makes it, as in `tw.codec('3lc', sparsity=1.75)`."""
        return f"tw.codec({', '.join([repr(self.id), *(f'{name}={value!r}' for name, value in self._changed())])})"

    def __str__(self) -> str:
        """The name by which a design takes it, as in `3lc[sparsity=1.75]`."""
        changed = ",".join(f"{name}={value}" for name, value in self._changed())
        return f"{self.id}[{changed}]" if changed else self.id

    def _changed(self) -> list[tuple[str, Any]]:
        """The options that do not have their defaults, in the order of `config()`."""
        defaults = {each.name: each.default for owner in (self, self.scheme) for each in fields(owner)}
        return [(name, value) for name, value in self.config().items() if name != "id" and value != defaults[name]]


WRAPPER_OPTIONS = ("entropy", "error_feedback", "error_scale", "nonfinite")
"""The options of every codec, in the order of `config()`."""


def encode_with_residual(scheme: Scheme, flat: Flat, step: Step, space: Scratch) -> Payload:
    """Error feedback around any scheme (3LC §3, 1-bit SGD): what is not sent now is added to the next tensor.

        v = scale·residual + values        sent = decode(encode(v))        residual = v − sent

    A scheme with kernels that do all of it in their own passes does so; for any other it takes three more.
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
    data = bytes(payload.data)  # a copy, because decoding may use the memory that it lies in
    sent = space.array("feedback.sent", size, dtype)
    scheme.decode(Frame(scheme.id, flat.dtype, flat.shape, payload.scales, payload.flags, data), sent, False, space)
    np.subtract(total, sent, out=residual)
    return Payload(data, payload.scales, payload.flags)


def _as_sent(scheme: Scheme, payload: Payload, flat: Flat) -> Payload:
    """Returns a payload with its scales as the frame will hold them, so that a sender decodes what receivers do.

    Raises TypeError where a scheme made something else than a payload, and NonFiniteError where its scales are not
    finite there: nobody could decode it.
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
    """Returns the largest |v|, of the values and the step's residual. Raises NonFiniteError for NaN or Inf."""
    residual, factor = (None, 1.0) if step is None else (step.residual, step.residual_scale)
    largest = max_magnitude(flat.values, residual, factor)
    require_finite_magnitude(largest)
    return largest


def stream_seed(seed: int, rank: int | None) -> int:
    """Returns the seed of one worker's random numbers, or of the shards'.

    All must differ: who rounds the mean of what some have rounded, with one's own numbers, counts that one twice.

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
    continued, so results depend neither on the order of layers nor on threads, and a resumed run draws what the first
    one drew.

    Example:
        >>> random_key(1, "conv1.weight", 0) == random_key(1, "conv1.weight", 0) != random_key(1, "conv1.weight", 1)
        True
    """
    digest = hashlib.blake2b(f"{seed}\0{step}\0{name}".encode(), digest_size=16).digest()
    word = int(np.random.Philox(key=int.from_bytes(digest, "little")).random_raw())
    return word & 0xFFFFFFFF, word >> 32
