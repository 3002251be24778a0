"""Fast arithmetic of the codecs, on flat NumPy arrays: no tensors, frames, threads or state between calls.

`reference` is the plain NumPy form, the judge; the names below are the Numba kernels, equal to it byte for byte.
`limits` has the machine's own limits, for benchmarks. Importing compiles nothing; the first call of a kernel does.
"""

from __future__ import annotations

from thinwire.kernels.magnitude import max_magnitude
from thinwire.kernels.pack import pack_base243
from thinwire.kernels.ternary import decode_ternary, encode_ternary
from thinwire.kernels.unpack import unpack_base243
from thinwire.kernels.workspace import Workspace
from thinwire.kernels.zero_run import zero_run_decode, zero_run_encode

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
