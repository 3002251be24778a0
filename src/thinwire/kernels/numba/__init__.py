"""The codecs' arithmetic on the CPU, compiled by Numba. Importing compiles nothing; the first call of a kernel does.

Inside this package `numba` still means the library: imports are absolute.
"""

from __future__ import annotations

from thinwire.kernels.numba.magnitude import max_magnitude
from thinwire.kernels.numba.ternary import decode_ternary, encode_ternary
from thinwire.kernels.numba.workspace import Workspace

__all__ = ["Workspace", "decode_ternary", "encode_ternary", "max_magnitude"]
