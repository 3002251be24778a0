"""What every kernel is made with: the decorator, the views that kernels take, and the largest magnitude.

Kernels are compiled on their first call (importing compiles nothing), release the interpreter lock and are cached on
disk, beside the source or in the user's cache folder. Where neither can be written, Numba refuses at import; where
there is no room when machine code is to be kept, that is logged, once. Kernels are then compiled once in each process.
No `parallel=True`: its thread layers abort when two threads enter, or in forks.

A kernel may call kernels of other files, whose machine code becomes part of its own. Numba's cache looks at the file of
the kernel that is called and at no other; the stamp added here is of every file of the package.

The magnitude bits of IEEE numbers, read as integers, order like the magnitudes, and NaN and Inf come out on top. So an
integer maximum, which compilers vectorise (they do not vectorise a float maximum, because of NaN), finds the largest
magnitude and answers "is everything finite?" with one comparison afterwards.
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
    """Numba's cache of one kernel, without which the kernel works as well.

    Machine code is kept in the middle of a call, once it is in memory, and a codec calls several kernels: an error from
    here would leave a residual that the first of them has written beside a frame that nobody got.
    """

    _told = False

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return super().load_overload(signature, target)
        except OSError:
            return None  # it is compiled again; whether it can be kept is told then

    def save_overload(self, signature: Any, code: Any) -> None:
        try:
            super().save_overload(signature, code)
        except OSError as error:
            if not _Cache._told:
                _Cache._told = True
                # Not a warning: one that is an error, as under `-W error`, would come out of the kernel's call too.
                _log.warning(
                    "compiled kernels cannot be kept in %s (%s), so that every process compiles them anew: make room "
                    "there, or name another folder in NUMBA_CACHE_DIR",
                    self.cache_path,
                    error.strerror or error,
                )


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` lazily, without the interpreter lock, cached where a cache can be written.

    Raises:
        ConfigError: Numba was told not to compile, with NUMBA_DISABLE_JIT=1.
    """
    if numba.config.DISABLE_JIT:  # said at import, when no residual has been written
        raise ConfigError(
            "NUMBA_DISABLE_JIT is set, and kernels here use instructions that only the compiler knows: unset it"
        )
    kernel: Any = numba.njit(nogil=True)(function)
    with suppress(RuntimeError):  # "cannot cache function ...: no locator available"
        kernel._cache = _Cache(function)  # as its `enable_caching` does
        index = kernel._cache._cache_file
        index._source_stamp = (index._source_stamp, _digest())  # where it differs, the machine code is not used
    return kernel  # type: ignore[no-any-return]


def frozen(array: Any) -> Any:
    """A read-only view. Kernels see every input as read-only, so that they are compiled once, not twice."""
    view = array.view()
    view.setflags(write=False)
    return view


def words_apart(buffer: Bytes, step: int) -> NDArray[np.uint64]:
    """`buffer` seen as overlapping 64-bit words that start every `step` bytes."""
    return np.ndarray(((buffer.size - 8) // step + 1,), dtype=np.uint64, buffer=buffer, strides=(step,))


def max_magnitude(values: Floats, residual: Floats | None = None, residual_scale: float = 1.0) -> float:
    """The largest absolute value of v = values, or residual_scale·residual + values; 0.0 when empty.

    Infinite or NaN as soon as one value is infinite or NaN: the caller decides what to raise.

    Args:
        values: float32[n] or float64[n].
        residual: of the same type and size; only read.
        residual_scale: what the residual is multiplied by.

    Example:
        >>> max_magnitude(np.array([1.0, -3.0, 2.0], dtype=np.float32))
        3.0
    """
    return largest_magnitude(frozen(values), residual, values.dtype.type(residual_scale))  # type: ignore[no-any-return]


@cache
def _digest() -> bytes:
    """Of every file that may be compiled into a kernel: this package, and the numbers that both backends share."""
    here = Path(__file__).parent
    digest = hashlib.blake2b()
    for path in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.digest()


@intrinsic
def wide_vectors(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """As the first line of a kernel: lets the compiler use the widest registers there are; no code of its own.

    For processors with AVX-512 that lower their clock for it, it would stop at half of them. Worth up to a third in
    loops bound by arithmetic; results are the same bits.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # llvmlite's own `add` knows no attributes with values. Where vectors are not 512 bits wide, LLVM ignores it.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def magnitude_bits(typing_context: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: the bits of a float32 or float64 without its sign, as int32 or int64."""
    bits_type: Any = types.int32 if value == types.float32 else types.int64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], context.get_value_type(bits_type))
        return builder.and_(bits, bits.type((1 << (bits_type.bitwidth - 1)) - 1))

    return bits_type(value), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: the float32 or float64 of these bits, int32 or int64."""
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

    Numba's `out[:] = values` takes ten times as long for bytes: it would be right for arrays that overlap, too.
    """
    for i in range(values.size):
        out[i] = values[i]
