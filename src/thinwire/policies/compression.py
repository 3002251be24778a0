"""Which codec for which tensor: a policy that a user may replace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from thinwire.codecs import Codec
from thinwire.codecs.registry import codec as make_codec

MIN_NUMEL = 128
"""Below it a frame's header weighs as much as the values it would save."""

PLAIN = make_codec("fp32")


@dataclass(frozen=True, slots=True)
class Choice:
    """The codec of one tensor in each direction."""

    up: Codec
    down: Codec


class Compression(Protocol):
    """Decides once, before training, how each tensor travels."""

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice:
        """Returns the codecs for the tensor called `name`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ByShape:
    """Matrices and kernels are compressed; biases, norm layers and small tensors travel as they are (3LC §4.2).

    Args:
        up: codec of the pushes.
        down: codec of the pulls.
        min_numel: tensors with fewer values are left alone.
        exclude: further tensors to leave alone, by name and shape.

    Example:
        >>> policy = ByShape(up=make_codec("3lc"), down=make_codec("3lc"))
        >>> policy.choose("fc.weight", (100, 10)).up.id, policy.choose("fc.bias", (10,)).up.id
        ('3lc', 'fp32')
    """

    up: Codec
    down: Codec
    min_numel: int = MIN_NUMEL
    exclude: Callable[[str, tuple[int, ...]], bool] | None = None

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice:
        left_alone = len(shape) <= 1 or math.prod(shape) < self.min_numel
        if left_alone or (self.exclude is not None and self.exclude(name, shape)):
            return Choice(PLAIN, PLAIN)
        return Choice(self.up, self.down)
