"""Training over thin wires: every state change of data-parallel training, packed 20–140× smaller.

    import thinwire as tw

    codec = tw.codec("3lc", sparsity=1.75)
    frame = codec.encode(tensor)          # one self-describing frame
    tensor = tw.decode(frame)

Importing starts nothing and loads no torch: each name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    EngineError,
    FrameError,
    NonFiniteError,
    ProtocolError,
    ThinwireError,
    TransportError,
)
from thinwire.version import VERSION

if TYPE_CHECKING:
    from thinwire import codecs, frames, ray
    from thinwire.codecs import Codec, Context, codec, decode
    from thinwire.hooks.distribute import distribute
    from thinwire.security import Credentials

__version__ = VERSION

_HOME = {
    "Codec": "thinwire.codecs",
    "Context": "thinwire.codecs",
    "Credentials": "thinwire.security",
    "codec": "thinwire.codecs",
    "decode": "thinwire.codecs",
    "distribute": "thinwire.hooks.distribute",
}
_MODULES = ("codecs", "frames", "ray")

__all__ = [
    "Codec",
    "ConfigError",
    "Context",
    "Credentials",
    "DataError",
    "DeadlineError",
    "EngineError",
    "FrameError",
    "NonFiniteError",
    "ProtocolError",
    "ThinwireError",
    "TransportError",
    "codec",
    "codecs",
    "decode",
    "distribute",
    "frames",
    "ray",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"thinwire.{name}")
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
