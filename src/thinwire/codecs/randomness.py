"""Where random codecs get their numbers: one stream for each (seed, tensor name, step).

A stream is keyed, not continued, so results depend neither on the order of layers nor on threads, and a resumed run
draws what the first one drew. `Randomised` is the base of codecs that draw, `Unbiased` of those whose mean over the
draws is the tensor itself.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.codecs.base import Codec, Draws


def stream(seed: int, name: str, step: int) -> Draws:
    """Returns the generator of one tensor at one step: Philox, keyed with a hash of all three.

    Example:
        >>> a, b = stream(1, "conv1.weight", 0), stream(1, "conv1.weight", 0)
        >>> bool(a.random() == b.random() != stream(1, "conv1.weight", 1).random())
        True
    """
    digest = hashlib.blake2b(f"{seed}\0{step}\0{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def key_of(draws: Draws | None) -> tuple[int, int]:
    """Draws the two 32-bit words that key the kernels' own counter-based numbers (`thinwire.kernels.numba.uniform`)."""
    word = (draws or stream(0, "", 0)).bit_generator.random_raw()
    return int(word) & 0xFFFFFFFF, int(word) >> 32


@dataclass(frozen=True, kw_only=True)
class Randomised(Codec):
    """A codec that draws random numbers."""

    random: ClassVar[bool] = True

    def draws(self, seed: int, name: str, step: int) -> Draws | None:
        """The stream of one tensor at one step."""
        return stream(seed, name, step)


@dataclass(frozen=True, kw_only=True)
class Unbiased(Randomised):
    """A random codec whose expectation is its input. Error feedback is allowed there, with a warning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.error_feedback:
            warnings.warn(
                f"{self.id} is unbiased: with error feedback its rounding noise, which would average out, is kept and "
                "sent again (3LC §3.1 reports that stochastic 3-value quantisation then failed to converge)",
                UserWarning,
                stacklevel=5,
            )
