"""The codecs' arithmetic on the CPU, compiled by Numba. Importing compiles nothing; the first call of a kernel does.

Inside this package `numba` is still the library: imports are absolute.
"""

from __future__ import annotations

from thinwire.kernels.numba.base243 import Workspace
from thinwire.kernels.numba.jit import max_magnitude
from thinwire.kernels.numba.ternary import decode_ternary, encode_ternary

__all__ = ["Workspace", "decode_ternary", "encode_ternary", "max_magnitude"]
