"""Float arrays given by their addresses, many in one call: largest magnitudes, copies, sums.

A kernel call, with the conversion of its arguments, costs more than the arithmetic of a small tensor. The caller keeps
the arrays alive and contiguous, and states their type and sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from thinwire.kernels.contract import Floats
from thinwire.kernels.numba.jit import copy, frozen, jit, largest_magnitude

Addresses = NDArray[np.int64]

ONE = np.float32(1)


def array_of(address: int, size: int) -> NDArray[np.float32]:
    """Returns the float32 array at an address, which the caller keeps alive."""
    memory = memoryview((ctypes.c_float * size).from_address(int(address)))
    return np.frombuffer(memory, np.float32)


def largest_of_many(values: Addresses, sizes: Addresses) -> list[float]:
    """Returns the largest magnitude of each float32 array at these addresses; NaN or Inf where a value is.

    Example:
        >>> array = np.array([1, -3, 2], np.float32)
        >>> largest_of_many(np.array([array.ctypes.data]), np.array([3]))
        [3.0]
    """
    largest = np.empty(values.size, np.float32)
    _largest_of_many(values, sizes, largest)
    return largest.tolist()


def gather(parts: Addresses, sizes: Addresses, whole: Floats) -> None:
    """Copies float32 or float64 arrays, given by their addresses, end to end into `whole`."""
    _gather(parts, sizes, whole)


def scatter(whole: Floats, parts: Addresses, sizes: Addresses) -> None:
    """Copies the parts of `whole` back to their arrays: the reverse of `gather`."""
    _scatter(frozen(whole), parts, sizes)


def add_to_many(whole: Floats, parts: Addresses, sizes: Addresses) -> None:
    """Adds the parts of `whole`, float32 or float64, to their arrays.

    Example:
        >>> first, second = np.ones(2, np.float32), np.ones(1, np.float32)
        >>> places = np.array([first.ctypes.data, second.ctypes.data])
        >>> add_to_many(np.array([1, 2, 3], np.float32), places, np.array([2, 1]))
        >>> first.tolist(), second.tolist()
        ([2.0, 3.0], [4.0])
    """
    _add_to_many(frozen(whole), parts, sizes)


@intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: turns an address into a pointer to numbers of the type of `like`."""
    pointer: Any = types.CPointer(like)  # type: ignore[attr-defined]  # numba's __init__ defines it by exec

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, like), generate


@jit
def array_at(address: Any, size: Any, like: Any) -> Any:
    return carray(_pointer(address, like), size)


@jit
def _largest_of_many(values: Any, sizes: Any, largest: Any) -> None:
    for i in range(values.size):
        largest[i] = largest_magnitude(array_at(values[i], sizes[i], ONE), None, ONE)


@jit
def _gather(parts: Any, sizes: Any, whole: Any) -> None:
    at = 0
    for i in range(parts.size):
        copy(array_at(parts[i], sizes[i], whole[0]), whole[at:])
        at += sizes[i]


@jit
def _scatter(whole: Any, parts: Any, sizes: Any) -> None:
    at = 0
    for i in range(parts.size):
        copy(whole[at : at + sizes[i]], array_at(parts[i], sizes[i], whole[0]))
        at += sizes[i]


@jit
def _add_to_many(whole: Any, parts: Any, sizes: Any) -> None:
    at = 0
    for i in range(parts.size):
        part = array_at(parts[i], sizes[i], whole[0])
        for k in range(sizes[i]):
            part[k] += whole[at + k]
        at += sizes[i]
