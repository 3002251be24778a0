"""Codec ids → classes: an explicit list, plus what other packages offer under the entry point `thinwire.codecs`."""

from __future__ import annotations

import difflib
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any

from thinwire.codecs.base import Codec
from thinwire.codecs.entropy import Entropy
from thinwire.codecs.floats import BF16, FP16, FP32
from thinwire.codecs.int8 import Int8
from thinwire.codecs.levels import QSGD, Dithering
from thinwire.codecs.mqe1 import MQE1
from thinwire.codecs.onebit import OneBit
from thinwire.codecs.randomk import RandomK
from thinwire.codecs.stochastic import QSGDDoubleSqueeze, Stoch3, TernGrad
from thinwire.codecs.threelc import ThreeLC
from thinwire.codecs.threshold import Threshold
from thinwire.codecs.topk import TopK
from thinwire.codecs.truncate import Truncate
from thinwire.codecs.votes import Votes
from thinwire.errors import ConfigError

SHIPPED: tuple[type[Codec], ...] = (
    FP32,
    FP16,
    BF16,
    Int8,
    ThreeLC,
    Stoch3,
    TernGrad,
    Votes,
    MQE1,
    OneBit,
    TopK,
    Threshold,
    RandomK,
    QSGD,
    QSGDDoubleSqueeze,
    Dithering,
    Truncate,
    Entropy,
)

_classes: dict[str, type[Codec]] = {}


def register(codec: type[Codec]) -> type[Codec]:
    """Adds a codec class under its id.

    Raises:
        ConfigError: the id is taken by another class, or cannot travel in a frame.
    """
    if not (0 < len(codec.id) < 256 and codec.id.isascii() and codec.id.isprintable()):
        raise ConfigError(f"codec id {codec.id!r}; it must be 1 to 255 printable ASCII characters")
    if _classes.setdefault(codec.id, codec) is not codec:
        raise ConfigError(f"codec id {codec.id!r} is taken by {_classes[codec.id].__name__}")
    return codec


for _codec in SHIPPED:
    register(_codec)


def ids() -> list[str]:
    """Returns the ids of all codecs, the shipped ones first."""
    _load_plugins()
    return list(_classes)


def find(codec_id: str) -> type[Codec]:
    """Returns the class of a codec id. Raises ConfigError listing the ids where there is none."""
    if codec_id not in _classes:
        _load_plugins()
    if codec_id not in _classes:
        raise ConfigError(f"unknown codec {codec_id!r}{_guess(codec_id, list(_classes))}; there are {ids()}")
    return _classes[codec_id]


def codec(id: str, **options: Any) -> Codec:
    """Returns a codec.

    Args:
        id: one of `tw.codecs()`.
        **options: the codec's own (see `docs/codecs.md`) and those of every codec: `entropy`, `error_feedback`,
            `error_scale`, `nonfinite`.

    Raises:
        ConfigError: an unknown id or option, or a value that is not allowed; the message lists what is.

    Example:
        >>> codec("3lc", sparsity=1.75).config()["sparsity"]
        1.75
    """
    kind = find(id)
    allowed = [field.name for field in fields(kind)]
    for name in options:
        if name not in allowed:
            raise ConfigError(f"{id}: unknown option {name!r}{_guess(name, allowed)}; there are {allowed}")
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(f"{id}: {error}") from error


def _guess(word: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(str(word), allowed, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_plugins_loaded = False


def _load_plugins() -> None:
    global _plugins_loaded
    if not _plugins_loaded:
        _plugins_loaded = True
        for point in entry_points(group="thinwire.codecs"):
            register(point.load())
