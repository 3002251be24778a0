"""The codecs' arithmetic on the CPU, compiled by Numba. Importing compiles nothing; the first call of a kernel does.

Inside this package `numba` still means the library: imports are absolute.
"""

from __future__ import annotations

from thinwire.kernels.numba.magnitude import max_magnitude
from thinwire.kernels.numba.pack import pack_base243
from thinwire.kernels.numba.ternary import decode_ternary, encode_ternary
from thinwire.kernels.numba.unpack import unpack_base243
from thinwire.kernels.numba.workspace import Workspace
from thinwire.kernels.numba.zero_run import zero_run_decode, zero_run_encode

__all__ = [
    "Workspace",
    "decode_ternary",
    "encode_ternary",
    "max_magnitude",
    "pack_base243",
    "unpack_base243",
    "zero_run_decode",
    "zero_run_encode",
]
