"""Which codec for which tensor, in each direction: a policy that a user may replace, by name or by an object.

A policy sees a tensor's name and shape and nothing else, so that every worker decides the same. By name it is made with
what the design says (codecs both ways, the smallest tensor, tensors to leave alone) and its own options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from thinwire.codecs import Codec
from thinwire.codecs.registry import codec as make_codec
from thinwire.errors import ConfigError
from thinwire.packets import MAX_BATCHED_NBYTES
from thinwire.policies.naming import parse_name
from thinwire.policies.plugins import plugins

MIN_NUMEL = 128
"""Below it a frame's header weighs as much as the values it would save."""

PLAIN = make_codec("fp32")


def is_batched(codec: Codec, shape: tuple[int, ...]) -> bool:
    """Returns whether tensors of this codec and shape travel in their message's batch.

    >>> is_batched(PLAIN, (20,)), is_batched(PLAIN, (1000, 1000)), is_batched(make_codec("3lc"), (20,))
    (True, False, False)
    """
    return codec == PLAIN and 0 < 4 * math.prod(shape) <= MAX_BATCHED_NBYTES


Exclude = Callable[[str, tuple[int, ...]], bool]
"""(name, shape) → whether a tensor is to be left uncompressed."""


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
    exclude: Exclude | None = None

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice:
        left_alone = len(shape) <= 1 or math.prod(shape) < self.min_numel
        if left_alone or (self.exclude is not None and self.exclude(name, shape)):
            return Choice(PLAIN, PLAIN)
        return Choice(self.up, self.down)


_SHIPPED: dict[str, Callable[..., Compression]] = {"by-shape": ByShape}


def compressions() -> dict[str, Callable[..., Compression]]:
    """Returns what makes each compression policy, by id: ours, and those of other packages (`thinwire.compression`)."""
    found = dict(_SHIPPED)
    for point in plugins("thinwire.compression"):
        found.setdefault(point.name, point.load())
    return found


def compression(
    name: str, *, up: Codec, down: Codec, min_numel: int = MIN_NUMEL, exclude: Exclude | None = None
) -> Compression:
    """Returns a policy by name, options in brackets.

    Args:
        name: as in `by-shape`, or another package's with its own options.
        up: the design's codec of the pushes.
        down: that of the pulls.
        min_numel: tensors with fewer values are left alone.
        exclude: further tensors to leave alone.

    Raises:
        ConfigError: an unknown policy or option.

    Example:
        >>> policy = compression("by-shape", up=make_codec("int8"), down=PLAIN)
        >>> policy.choose("fc.weight", (100, 10)).up.id
        'int8'
    """
    kind_id, options = parse_name(name, "compression")
    known = compressions()
    if kind_id not in known:
        raise ConfigError(f"unknown compression {kind_id!r}; there are {', '.join(known)}")
    given = {"up": up, "down": down, "min_numel": min_numel, "exclude": exclude}
    if own := sorted(set(options) & set(given)):
        raise ConfigError(f"compression {name!r}: the design says {', '.join(own)}; leave it out of the brackets")
    try:
        return known[kind_id](**given, **options)
    except TypeError as error:
        raise ConfigError(f"compression {name!r}: {error}") from error
