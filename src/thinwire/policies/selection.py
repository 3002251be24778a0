"""The codecs of every tensor of a model: one selection for the parameter server and for the collective mode.

A compression policy decides for each tensor by its name and shape; exceptions for names that match a pattern, and for
the last layer, come before it. What cannot train is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from thinwire.codecs import Codec
from thinwire.codecs.registry import codec as make_codec
from thinwire.errors import ConfigError
from thinwire.policies.compression import Choice, Compression

Shape = tuple[int, ...]


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
    shapes: Mapping[str, Shape],
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
        ConfigError: patterns that match nothing, or error feedback on pulls with a random codec, which diverges.

    Example:
        >>> from thinwire.policies.compression import ByShape
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
            f"{name}: {codec.id!r} draws random numbers; with error feedback on pulls the training diverges. Set "
            "error_feedback=False on the way down, or a deterministic codec_down such as '3lc'"
        )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
