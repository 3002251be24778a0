"""The contract of a scheme: how one codec id turns values into a payload and back.

A scheme is a frozen dataclass; its fields are the options of its id. It has no state and knows no tensors, frames'
bytes, residuals' memory or second stages: a `Codec` (`base.py`) puts those around it. A new scheme writes `encode` and
`decode` on flat arrays, and registers.

Decoding needs nothing but the frame, so `decode` and the sizes are class methods.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Frame

Key: TypeAlias = tuple[int, int]
"""Two words of 32 bits, from which all random numbers of one tensor at one step come."""
Explained: TypeAlias = dict[str, tuple[Any, str]]
"""The fields of a frame by name: what each holds, as a JSON value, and what that means."""


class Payload(NamedTuple):
    """What a scheme makes of a tensor. `data` may be a view into the scratch, valid until its next use."""

    data: bytes | memoryview | NDArray[np.uint8]
    scales: tuple[float, ...] = ()
    flags: int = 0


class StepOptions(TypedDict, total=False):
    """What may be said of one tensor at one step, to the codecs that take it (`Scheme.step_options`)."""

    scale: float
    """The scale that all workers share (`terngrad`, `votes`)."""
    workers: int
    """How many workers' trits were added (`votes`)."""
    rms: float
    """Root mean square of the loss's derivative by the values (`entropy` with `mode="rms"`)."""


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
    private_options: ClassVar[frozenset[str]] = frozenset()
    """Options that concern one machine alone: peers may differ in them."""
    option_flags: ClassVar[int] = 0
    """The high-byte flags (`Flags.OPTION_A` …) that its frames may carry."""

    @property
    def step_options(self) -> frozenset[str]:
        """Which of `StepOptions` it takes, as it is configured."""
        return frozenset()

    def fuses_residual(self, shape: tuple[int, ...]) -> bool:
        """Whether `encode` adds `step.residual` and leaves there what was not sent, in the passes that it makes anyway.

        For other schemes and shapes error feedback encodes the sum, decodes it and subtracts (`feedback.py`).
        """
        del shape
        return False

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

    # ---- what schemes check

    def check_choice(self, name: str, allowed: tuple[object, ...]) -> None:
        """Raises ConfigError where an option is none of those."""
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(f"{self.id}: {name}={value!r}; allowed are {' and '.join(map(repr, allowed))}")

    def check_number(
        self,
        name: str,
        least: float,
        most: float = math.inf,
        *,
        whole: bool = False,
        above: bool = False,
        optional: bool = False,
    ) -> None:
        """Raises ConfigError where an option is no number from `least` to `most`.

        Args:
            name: of the option.
            least: the smallest number allowed.
            most: the largest; no option may be infinite.
            whole: only whole numbers are.
            above: `least` itself is not.
            optional: None is.
        """
        value = getattr(self, name)
        if optional and value is None:
            return
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most or abs(value) == math.inf or (above and value == least):
            kind = "whole numbers" if whole else "finite numbers" if most == math.inf else "numbers"
            bounds = f"{'above' if above else 'from'} {least:g}" + (f" to {most:g}" if most < math.inf else "")
            raise ConfigError(f"{self.id}: {name}={value!r}; allowed are {'None and ' * optional}{kind} {bounds}")


def one_scale(frame: Frame) -> float:
    """The frame's one scale. Raises FrameError where it is another number of scales, or negative."""
    if len(frame.scales) != 1 or frame.scales[0] < 0:
        raise FrameError(f"{frame.codec} sends one scale of at least 0; {list(frame.scales)[:4]} came")
    return frame.scales[0]


def no_scales(frame: Frame) -> None:
    """Raises FrameError where scales came."""
    if frame.scales:
        raise FrameError(f"{frame.codec} sends no scales, {len(frame.scales)} came")
