"""Tensor ↔ payload ↔ frame.

`scheme.py` is the interface that turns values into a payload; one file per family implements it. `base.py` has the
codec around a scheme and the context of one tensor; `encoding.py` encodes many tensors at once. `registry.py` lists the
schemes and decodes frames; `decoding.py` checks frames and adds them up.

`thinwire.codecs` is a package that can be called: `tw.codecs()` returns the codec ids. Type checkers know no such
package; declared as anything else, its classes could be neither types nor bases. `tw.codecs.ids()` is the same.

Example:
    >>> import thinwire as tw
    >>> tw.codecs()[:5]
    ['fp32', 'fp16', 'bf16', 'int8', '3lc']
"""

from __future__ import annotations

import sys
from types import ModuleType

from thinwire.codecs.base import Codec, Context
from thinwire.codecs.decoding import CheckedFrame
from thinwire.codecs.encoding import Encoding, decode_all, encode_all
from thinwire.codecs.options import Between
from thinwire.codecs.registry import codec, decode, find, ids, open_frame, open_parsed, register
from thinwire.codecs.scheme import Payload, Scheme, Step, StepOptions, finite_magnitude
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray

__all__ = [
    "Between",
    "CheckedFrame",
    "Codec",
    "Context",
    "Encoding",
    "Flat",
    "FloatArray",
    "Payload",
    "Scheme",
    "Scratch",
    "Step",
    "StepOptions",
    "codec",
    "decode",
    "decode_all",
    "encode_all",
    "find",
    "finite_magnitude",
    "ids",
    "open_frame",
    "open_parsed",
    "register",
]


class _CodecsPackage(ModuleType):
    """A module that can be called; Python documents assigning a module's `__class__` for this."""

    def __call__(self) -> list[str]:
        """Returns the ids of all codecs."""
        return ids()


sys.modules[__name__].__class__ = _CodecsPackage
