"""The decorator of every kernel, the views that kernels take, and the largest magnitude.

Kernels are compiled on their first call (importing compiles nothing), release the interpreter lock and are cached on
disk, beside the source or in the user's cache folder. Where neither can be written, or the disk is full (which is
logged once), every process compiles them. No `parallel=True`: its thread layers abort when two threads enter, or in
forks.

A kernel's machine code includes that of kernels in other files. Numba's cache checks only the file of the called
kernel; the stamp added here covers every file of the package.

The magnitude bits of IEEE numbers, read as integers, order like the magnitudes, and NaN and Inf are the largest. An
integer maximum, which compilers vectorise (unlike a float maximum, because of NaN), therefore finds the largest
magnitude; one comparison then tests whether every value is finite.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic
from numpy.typing import NDArray

from thinwire.errors import ConfigError
from thinwire.kernels.contract import Bytes, Floats

_log = logging.getLogger(__name__)


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Numba's cache of one kernel; cache errors are logged, because the kernel works without a cache.

    Numba saves machine code in the middle of a call, and a codec calls several kernels: an error here would lose the
    frame of a residual that the first kernel has already written.
    """

    _told = False

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return super().load_overload(signature, target)
        except OSError:
            return None  # the kernel is compiled again; saving it then logs any error

    def save_overload(self, signature: Any, code: Any) -> None:
        try:
            super().save_overload(signature, code)
        except OSError as error:
            if not _Cache._told:
                _Cache._told = True
                # Not a warning: under `-W error` it would raise from the kernel's call.
                _log.warning(
                    "compiled kernels cannot be kept in %s (%s), so that every process compiles them anew: make room "
                    "there, or name another folder in NUMBA_CACHE_DIR",
                    self.cache_path,
                    error.strerror or error,
                )


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles `function` lazily, without the interpreter lock, cached where a cache can be written.

    Raises:
        ConfigError: NUMBA_DISABLE_JIT=1 forbids Numba to compile.
    """
    if numba.config.DISABLE_JIT:  # raised at import, before a residual is written
        raise ConfigError(
            "NUMBA_DISABLE_JIT is set, but these kernels use instructions that only the compiler knows: unset it"
        )
    kernel: Any = numba.njit(nogil=True)(function)
    with suppress(RuntimeError):  # "cannot cache function ...: no locator available"
        kernel._cache = _Cache(function)  # as Numba's `enable_caching` does
        index = kernel._cache._cache_file
        index._source_stamp = (index._source_stamp, _digest())  # cached machine code with another stamp is not used
    return kernel  # type: ignore[no-any-return]


def frozen(array: Any) -> Any:
    """Returns a read-only view. Every input of a kernel is read-only, so that it is compiled once, not twice."""
    view = array.view()
    view.setflags(write=False)
    return view


def words_apart(buffer: Bytes, step: int) -> NDArray[np.uint64]:
    """Returns `buffer` as overlapping 64-bit words that start every `step` bytes."""
    return np.ndarray(((buffer.size - 8) // step + 1,), dtype=np.uint64, buffer=buffer, strides=(step,))


def max_magnitude(values: Floats, residual: Floats | None = None, residual_scale: float = 1.0) -> float:
    """Returns the largest absolute value of v = values, or residual_scale·residual + values; 0.0 when empty.

    The result is infinite or NaN where a value is: the caller chooses the error.

    Args:
        values: float32[n] or float64[n].
        residual: of the same type and size; only read.
        residual_scale: factor on the residual.

    Example:
        >>> max_magnitude(np.array([1.0, -3.0, 2.0], dtype=np.float32))
        3.0
    """
    return largest_magnitude(frozen(values), residual, values.dtype.type(residual_scale))  # type: ignore[no-any-return]


@cache
def _digest() -> bytes:
    """Returns the digest of every file that may be compiled into a kernel: this package and `contract.py`."""
    here = Path(__file__).parent
    digest = hashlib.blake2b()
    for path in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.digest()


@intrinsic
def wide_vectors(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """As the first line of a kernel: lets the compiler use the widest registers; adds no instructions.

    By default the compiler uses half registers on processors that lower their clock for AVX-512. Wide registers save up
    to a third of the time in loops bound by arithmetic; results have the same bits.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # llvmlite's `add` takes no attributes with values. Where vectors are not 512 bits wide, LLVM ignores this one.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def magnitude_bits(typing_context: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: returns the bits of a float32 or float64 without its sign, as int32 or int64."""
    bits_type: Any = types.int32 if value == types.float32 else types.int64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], context.get_value_type(bits_type))
        return builder.and_(bits, bits.type((1 << (bits_type.bitwidth - 1)) - 1))

    return bits_type(value), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: returns the float32 or float64 of these bits, int32 or int64."""
    value_type = types.float32 if bits == types.int32 else types.float64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(value_type))

    return value_type(bits), generate


@jit
def largest_magnitude(values: Any, residual: Any, scale: Any) -> Any:
    """`max_magnitude` of a read-only view, with the scale in the type of the values."""
    wide_vectors()
    largest = magnitude_bits(values.dtype.type(0))
    for i in range(values.size):
        largest = max(largest, magnitude_bits(values[i] if residual is None else scale * residual[i] + values[i]))
    return float_of_bits(largest)


@jit
def copy(values: Any, out: Any) -> None:
    """Copies flat values to the beginning of `out`, at the speed of memory.

    Numba's `out[:] = values`, which also allows overlapping arrays, takes ten times as long for bytes.
    """
    for i in range(values.size):
        out[i] = values[i]
