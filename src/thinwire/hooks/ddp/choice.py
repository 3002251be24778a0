"""Which codec for which parameter: what `ddp.compress` was asked for, turned into one choice a tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from thinwire.codecs import Codec
from thinwire.codecs.registry import codec as make_codec
from thinwire.errors import ConfigError
from thinwire.policies.compression import ByShape, Choice, Compression

Shape = tuple[int, ...]


def choose(
    shapes: Mapping[str, Shape],
    codec: str | Codec,
    options: Mapping[str, Any],
    *,
    codec_down: str | Codec | None,
    min_numel: int,
    exclude: Callable[[str, Shape], bool] | None,
    codecs: Mapping[str, str | Codec],
    last_layer: str | Codec | None,
    compression: Compression | None,
) -> dict[str, Choice]:
    """Returns the codecs of every parameter; the arguments are those of `ddp.compress`.

    Non-finite values are the hook's business, so every codec refuses them.

    Raises:
        ConfigError: unknown codecs or options, patterns that match nothing, or error feedback on the averages with
            a random codec, which diverges.

    Example:
        >>> made = choose({"fc.weight": (64, 32), "fc.bias": (64,)}, "3lc", {}, codec_down=None, min_numel=128,
        ...               exclude=None, codecs={}, last_layer=None, compression=None)
        >>> made["fc.weight"].up.id, made["fc.bias"].up.id
        ('3lc', 'fp32')
    """
    if compression is None:
        up = _codec(codec, options)
        down = up if codec_down is None else _codec(codec_down, {})
        compression = ByShape(up=up, down=down, min_numel=min_numel, exclude=exclude)
    special = {pattern: _codec(given, {}) for pattern, given in codecs.items()}
    last = None if last_layer is None else _codec(last_layer, {})
    last_module = _last_module(shapes)
    unmatched = set(special)
    made: dict[str, Choice] = {}
    for name, shape in shapes.items():
        choice = compression.choose(name, shape)
        found = next((pattern for pattern in special if fnmatchcase(name, pattern)), None)
        if found is not None:
            unmatched.discard(found)
            choice = Choice(special[found], special[found])
        elif last is not None and name.rpartition(".")[0] == last_module:
            choice = Choice(last, last)
        made[name] = Choice(replace(choice.up, nonfinite="raise"), replace(choice.down, nonfinite="raise"))
    if unmatched:
        raise ConfigError(f"codecs: {sorted(unmatched)} match no parameter; there are {list(shapes)[:8]} …")
    _check_feedback(made)
    return made


def _codec(codec: str | Codec, options: Mapping[str, Any]) -> Codec:
    if isinstance(codec, str):
        return make_codec(codec, **options)
    if options:
        raise ConfigError(f"options {sorted(options)} belong to a codec's id; {codec!r} is a codec already")
    if not isinstance(codec, Codec):
        raise ConfigError(f"a codec is an id such as '3lc', or what tw.codec returns; {codec!r} came")
    return codec


def _last_module(shapes: Mapping[str, Shape]) -> str | None:
    """The module of the last matrix: what TernGrad, for one, leaves uncompressed."""
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    return matrices[-1].rpartition(".")[0] if matrices else None


def _check_feedback(choices: Mapping[str, Choice]) -> None:
    for name, choice in choices.items():
        if choice.down.random and choice.down.residual_by_default:
            raise ConfigError(
                f"{name}: error feedback on the averages with the random codec {choice.down.id!r} diverges; "
                "set error_feedback=False, or a deterministic codec_down such as '3lc'"
            )
    random = {choice.up.id for choice in choices.values() if choice.up.random and choice.up.residual_by_default}
    if random:
        warnings.warn(
            f"error feedback around the random codec {sorted(random)} may keep training from converging (3LC §3.1)",
            stacklevel=4,
        )
