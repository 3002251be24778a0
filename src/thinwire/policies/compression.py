"""Which codec for which tensor, in each direction, for the parameter server and for the collective mode.

A policy that a user may replace, by name or by an object, decides by a tensor's name and shape alone, so that every
worker decides the same. By name it is made with what the design says (codecs both ways, the smallest tensor, tensors to
leave alone) and its own options. Exceptions, for names that match a pattern and for the last layer, come before it.
What cannot train is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from thinwire.codecs import Codec
from thinwire.codecs.registry import codec as make_codec
from thinwire.errors import ConfigError
from thinwire.names import parse_name
from thinwire.packets import MAX_BATCHED_NBYTES
from thinwire.policies.naming import Family

MIN_NUMEL = 128
"""Below it a frame's header weighs as much as the values it would save."""

PLAIN, NARROW = make_codec("fp32"), make_codec("bf16")


def is_batched(codec: Codec, shape: tuple[int, ...]) -> bool:
    """Returns whether tensors of this codec and shape travel in their message's batch.

    >>> is_batched(PLAIN, (20,)), is_batched(PLAIN, (1000, 1000)), is_batched(make_codec("3lc"), (20,))
    (True, False, False)
    """
    # One batch has one codec, and where matrices travel as bf16, norms and biases are uncompressed as a rule.
    kind = codec == PLAIN or (codec == NARROW and len(shape) <= 1)
    return kind and 0 < 4 * math.prod(shape) <= MAX_BATCHED_NBYTES


Exclude = Callable[[str, tuple[int, ...]], bool]
"""(name, shape) → whether a tensor is to be left uncompressed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The codec of one tensor in each direction."""

    up: Codec
    down: Codec


@runtime_checkable
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
        small: name of the codec of biases, norm layers and small tensors, both ways, but of excluded ones. Those in
            `fp32` and `bf16` share a frame.

    Raises:
        ConfigError: an unknown codec for small tensors, or an `exclude` that cannot be called.

    Example:
        >>> policy = ByShape(up=make_codec("3lc"), down=make_codec("3lc"))
        >>> policy.choose("fc.weight", (100, 10)).up.id, policy.choose("fc.bias", (10,)).up.id
        ('3lc', 'fp32')
    """

    up: Codec
    down: Codec
    min_numel: int = MIN_NUMEL
    exclude: Exclude | None = None
    small: str = "fp32"

    def __post_init__(self) -> None:
        codec_by_name(self.small)
        if self.exclude is not None and not callable(self.exclude):
            raise ConfigError(
                f"exclude={self.exclude!r}; it is called with every tensor's name and shape, as in "
                "exclude=lambda name, shape: name == 'head.weight'"
            )

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice:
        if self.exclude is not None and self.exclude(name, shape):
            return Choice(PLAIN, PLAIN)
        if len(shape) <= 1 or math.prod(shape) < self.min_numel:
            small = codec_by_name(self.small)
            return Choice(small, small)
        return Choice(self.up, self.down)


POLICIES: Family[Compression] = Family("compression", {"by-shape": ByShape}, Compression)


def compression(
    name: str, *, up: Codec, down: Codec, min_numel: int = MIN_NUMEL, exclude: Exclude | None = None
) -> Compression:
    """Returns a policy by name, options in brackets.

    Args:
        name: as in `by-shape` or `by-shape[small=int8]`, or another package's with its own options.
        up: the design's codec of the pushes.
        down: that of the pulls.
        min_numel: tensors with fewer values are left alone.
        exclude: further tensors to leave alone.

    Raises:
        ConfigError: an unknown policy or option, or one that the design decides.

    Example:
        >>> policy = compression("by-shape", up=make_codec("int8"), down=PLAIN)
        >>> policy.choose("fc.weight", (100, 10)).up.id
        'int8'
    """
    return POLICIES.make(name, up=up, down=down, min_numel=min_numel, exclude=exclude)


def codec_by_name(name: str, **options: Any) -> Codec:
    """Returns a codec by name with options in brackets; they go before those that are given beside it.

    >>> codec_by_name("topk[fraction=0.05]").config()["fraction"]
    0.05
    """
    codec_id, own = parse_name(name, "codec")
    return make_codec(codec_id, **{**options, **own})


def as_codec(codec: str | Codec, options: Mapping[str, Any]) -> Codec:
    """Returns the codec that a user means.

    Args:
        codec: an id, or a codec.
        options: of the id.

    Raises:
        ConfigError: an unknown id or option, options beside a codec, or something else.

    Example:
        >>> as_codec("3lc", {"sparsity": 1.5}).config()["sparsity"]
        1.5
    """
    if isinstance(codec, str):
        return make_codec(codec, **options)
    if options:
        raise ConfigError(f"options {sorted(options)} belong to a codec's id; {codec!r} is a codec already")
    if not isinstance(codec, Codec):
        raise ConfigError(f"a codec is an id such as '3lc', or what tw.codec returns; {codec!r} came")
    return codec


def select(
    shapes: Mapping[str, tuple[int, ...]],
    compression: Compression,
    *,
    codecs: Mapping[str, str | Codec] | None = None,
    last_layer: str | Codec | None = None,
) -> dict[str, Choice]:
    """Returns the codecs of every tensor.

    Args:
        shapes: of the trained tensors by name, in the model's order.
        compression: decides for a tensor that is no exception.
        codecs: exceptions: another codec, both ways, for names that match a pattern; the first match wins.
        last_layer: another codec for the tensors of the module that holds the last matrix, such as `"fp32"`, which
            TernGrad uses (§4.2).

    Raises:
        ConfigError: patterns that match nothing, or nothing that earlier ones leave, or error feedback on pulls with a
            random codec, which may diverge.

    Example:
        >>> codec = make_codec("3lc")
        >>> chosen = select({"fc.weight": (64, 32), "fc.bias": (64,)}, ByShape(up=codec, down=codec))
        >>> chosen["fc.weight"].up.id, chosen["fc.bias"].up.id
        ('3lc', 'fp32')
    """
    by_pattern = {pattern: as_codec(given, {}) for pattern, given in (codecs or {}).items()}
    of_last = None if last_layer is None else as_codec(last_layer, {})
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    last = _module_of(matrices[-1]) if matrices else None
    unmatched = set(by_pattern)
    chosen: dict[str, Choice] = {}
    for name, shape in shapes.items():
        pattern = next((pattern for pattern in by_pattern if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            unmatched.discard(pattern)
            chosen[name] = Choice(by_pattern[pattern], by_pattern[pattern])
        elif of_last is not None and _module_of(name) == last:
            chosen[name] = Choice(of_last, of_last)
        else:
            chosen[name] = compression.choose(name, shape)
    for pattern in by_pattern:  # in the order given
        if pattern in unmatched and (taken := [name for name in shapes if fnmatchcase(name, pattern)]):
            first = next(other for other in by_pattern if fnmatchcase(taken[0], other))
            raise ConfigError(
                f"codecs: {pattern!r} comes after {first!r}, which takes {taken[0]} before it, and nothing is left to "
                f"it: the first match wins, so put {pattern!r} first"
            )
    if unmatched:
        raise ConfigError(f"codecs: {sorted(unmatched)} match no parameter; there are {list(shapes)[:8]} …")
    for name, choice in chosen.items():
        check_pull_codec(choice.down, name)
    return chosen


def check_pull_codec(codec: Codec, name: str) -> None:
    """Refuses error feedback on pulls with a random codec: the loop through the optimizer amplifies the noise.

    Args:
        codec: of the pulls.
        name: of the tensor or the design, for the message.

    Raises:
        ConfigError: the codec draws random numbers and keeps a residual.
    """
    if codec.random and codec.residual_by_default:
        raise ConfigError(
            f"{name}: {codec.id!r} draws random numbers; with error feedback on pulls a training may diverge. Set "
            "error_feedback=False on the way down, or a deterministic codec_down such as '3lc'"
        )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
