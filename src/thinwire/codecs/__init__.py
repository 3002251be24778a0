"""Tensor ↔ payload ↔ frame. One file per family; `registry` lists them; `context` keeps a residual around any codec.

`thinwire.codecs` is a package and, called, the list of codec ids: `tw.codecs()`.
"""

from __future__ import annotations

import sys
from types import ModuleType

from thinwire.codecs.base import Codec
from thinwire.codecs.context import Context
from thinwire.codecs.decoding import decode
from thinwire.codecs.registry import codec, ids, register

__all__ = ["Codec", "Context", "codec", "decode", "ids", "register"]


class _CodecsPackage(ModuleType):
    """Python documents assigning a module's `__class__` for exactly this: a module with behaviour of its own."""

    def __call__(self) -> list[str]:
        """Returns the ids of all codecs."""
        return ids()


sys.modules[__name__].__class__ = _CodecsPackage
